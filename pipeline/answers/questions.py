"""The answers of an experiment: the claims of every question."""

from collections.abc import Callable, Sequence

from pipeline.answers.accuracy_claims import int8_claims, large_batch_claims
from pipeline.answers.claims import Claim
from pipeline.answers.timing_claims import batch_size_claims, communication_claims, speedup_claims
from pipeline.experiment.point_label import Processors, name_processors
from pipeline.tables.build_tables import Tables, gpu_models, on_gpu

Answers = dict[str, list[Claim]]
"""The claims of each question."""


def answer_questions(tables: Tables) -> Answers:
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


def render_answer(claims: Sequence[Claim], processors: Processors) -> list[str]:
    """Return a paragraph for each GPU model that the claims are about."""
    paragraphs = []
    for gpu in dict.fromkeys(claim.gpu for claim in claims):
        said = " ".join(sentence for claim in claims if claim.gpu == gpu for sentence in claim.sentences())
        paragraphs.append(f"On {gpu}: {said}" if gpu else name_processors(said, processors))
    return paragraphs


def next_command(claims: Sequence[Claim]) -> str:
    """Return the command that measures what is missing; "" if nothing is."""
    return next((claim.command for claim in claims if claim.command), "")


def answered_claims(claims: Sequence[Claim]) -> list[Claim]:
    """Return the claims that answer something."""
    return [claim for claim in claims if claim.is_answer]
