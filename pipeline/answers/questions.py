"""The answers of an experiment: the claims of every question."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipeline.answers.accuracy_claims import int8_claims, large_batch_claims
from pipeline.answers.claims import Claim
from pipeline.answers.timing_claims import batch_size_claims, communication_claims, speedup_claims
from pipeline.experiment.point_label import Processors, name_processors
from pipeline.tables.build_tables import Tables, gpu_models, on_gpu


class Answer(NamedTuple):
    """The answer to a question: its claims, and the word for what the points ran on."""

    question: str
    claims: Sequence[Claim]
    processors: Processors

    @property
    def paragraphs(self) -> list[str]:
        """The answer in words, with a paragraph for each GPU model that the claims are about."""
        paragraphs = []
        for gpu in dict.fromkeys(claim.gpu for claim in self.claims):
            said = " ".join(sentence for claim in self.claims if claim.gpu == gpu for sentence in claim.sentences())
            paragraphs.append(f"On {gpu}: {said}" if gpu else name_processors(said, self.processors))
        return paragraphs

    @property
    def told(self) -> str:
        """What the claims answer; "" if they only say why there is no answer."""
        return " ".join(self._replace(claims=[claim for claim in self.claims if claim.is_answer]).paragraphs)

    @property
    def command(self) -> str:
        """The command that measures what is missing; "" if nothing is."""
        return next((claim.command for claim in self.claims if claim.command), "")


def answers_of(tables: Tables, processors: Processors) -> list[Answer]:
    return [Answer(question, claims, processors) for question, claims in answer_questions(tables).items()]


def answer_questions(tables: Tables) -> dict[str, list[Claim]]:
    """Return the claims of each question. If the rows hold no answer, a claim has the command that measures one.

    An experiment that quantizes has one question, what int8 costs.
    """
    if tables["int8"]:
        return {"int8": int8_claims(tables["int8"])}
    return {
        "Q1": claims_on_each_gpu(tables, batch_size_claims),
        "Q2": claims_on_each_gpu(tables, speedup_claims),
        "Q3": claims_on_each_gpu(tables, communication_claims),
        "Q4": large_batch_claims(tables["time_to_target"]),
    }


def claims_on_each_gpu(tables: Tables, claim: Callable[[Tables], list[Claim]]) -> list[Claim]:
    """Return the claims about times or memory, on each GPU model apart if there are several."""
    models = gpu_models(tables)
    if len(models) < 2:
        return claim(tables)
    made = [part._replace(gpu=gpu, command="") for gpu in models for part in claim(on_gpu(tables, gpu))]
    return [part for part in made if part.is_answer] or claim(on_gpu(tables, models[0]))
