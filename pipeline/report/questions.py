"""Every question of a report in order. The words of an answer stand with its question, in q1 to q5, memory and int8."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, get_args

from pipeline.plan.point_label import Terms, in_terms
from pipeline.report.claims import SUBMIT, SeparateAxis, Tile
from pipeline.report.int8 import int8_claims
from pipeline.report.nodes import node_claims
from pipeline.report.q1 import batch_size_claims
from pipeline.report.q2 import speedup_claims
from pipeline.report.q3 import communication_claims
from pipeline.report.q4 import large_batch_claims
from pipeline.report.q5 import use_claims
from pipeline.report.table import Tables
from pipeline.report.tables import part_of, values_of

BY: tuple[SeparateAxis, ...] = get_args(SeparateAxis)

TOPICS = {
    "Q5": "Recommendation",
    "Q1": "Batch size",
    "Q2": "Scaling",
    "Q3": "Communication",
    "Q4": "Accuracy",
    "int8": "Accuracy in int8",
}
"""Each question in a word or two, in the order in which a reader meets them: first what to use."""

ASKED_ABOUT = {
    "Q1": "the batch size that keeps one $GPU busy",
    "Q2": "scaling over $GPUs",
    "Q3": "communication",
    "Q4": "the accuracy of large batches",
}
"""What an experiment that does not ask a question leaves out."""


class Answer(NamedTuple):
    """The answer to a question: its claims, and the word for what the points ran on."""

    question: str
    claims: Sequence[Tile]
    terms: Terms

    @property
    def topic(self) -> str:
        """The question in a word or two; of a user's own model what it tests is no accuracy."""
        is_own = self.question == "Q4" and self.terms.own_model
        return "Large batches" if is_own else TOPICS[self.question]

    @property
    def is_answered(self) -> bool:
        """True if a claim answers; False if all only say why there is no answer."""
        return any(claim.is_answer for claim in self.claims)

    @property
    def tiles(self) -> list[Tile]:
        """The tiles of what was asked. One that only says why there is no answer has the topic and the command."""
        found = (claim.in_words_of(self.terms) for claim in self.claims if claim.is_asked)
        return [tile if tile.label else tile._replace(label=self.topic, command=self.command) for tile in found]

    @property
    def command(self) -> str:
        """The command that measures what is missing; "" if nothing is, or if no shipped grid does so."""
        command = next((claim.command for claim in self.claims if claim.command), "")
        if command and self.terms.words_of_run:
            return run_command(self.question, self.terms.words_of_run)
        if command and self.terms.own_model:
            return own_model_command(self.question, command, self.terms.own_model)
        return command


def not_asked(answers: Iterable[Answer]) -> list[str]:
    """Return what an experiment leaves out."""
    return [in_terms(ASKED_ABOUT[answer.question], answer.terms) for answer in answers if not answer.tiles]


def run_command(question: str, words_of_run: str) -> str:
    """Return the command that measures what is missing of a user's script; "" where no option of `run` does so."""
    options = {"Q2": "--num-gpus 1,2", "Q3": "--num-gpus 2 --measure communication"}.get(question)
    return f"ddpscale run {options} {words_of_run}" if options else ""


def own_model_command(question: str, command: str, model: str) -> str:
    """Return the command that measures the same of a user's model; "" for Q4, which needs a test of the user's.

    `model` has the words after --set.
    """
    if question == "Q4":
        return ""
    if "--grid memory" in command:
        return f"{SUBMIT} --grid memory --set {model} strategy=single num_gpus=1"
    return f"{SUBMIT} --grid own-model --set {model}"


def answers_of(tables: Tables, terms: Terms) -> list[Answer]:
    return [Answer(question, claims, terms) for question, claims in answer_questions(tables).items()]


def answer_questions(tables: Tables) -> dict[str, list[Tile]]:
    """Return the claims of each question. If the rows hold no answer, a claim has the command that measures one.

    Q5, what to use, comes first, and is left out where no epoch was timed. An experiment that quantizes has one
    question, what int8 costs.
    """
    if tables["int8"]:
        return {"int8": int8_claims(tables["int8"])}
    use = claims_of_each(tables, BY, use_claims)
    return ({"Q5": use} if use else {}) | {
        "Q1": claims_of_each(tables, BY, batch_size_claims),
        "Q2": claims_of_each(tables, BY, lambda own: [*speedup_claims(own), *node_claims(own)]),
        "Q3": claims_of_each(tables, BY, communication_claims),
        "Q4": large_batch_claims(tables["time_to_target"]),
    }


def claims_of_each(tables: Tables, axes: Sequence[SeparateAxis], claim: Callable[[Tables], list[Tile]]) -> list[Tile]:
    """Return the claims about times or memory, for each value of these axes apart if there are several."""
    if not axes:
        return claim(tables)
    axis, *others = axes
    values = values_of(tables, axis)
    if len(values) < 2:
        return claims_of_each(tables, others, claim)
    claims = {value: claims_of_each(part_of(tables, axis, value), others, claim) for value in values}
    told = [part.narrow(axis, value) for value in values for part in claims[value] if part.is_answer]
    return told or max(claims.values(), key=lambda own: any(part.is_asked for part in own))
