"""check: every refusal of a class at once, in the sentences of a run, before any run."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Command, assert_refused, everything_in, run_here
from factories import ROOT, assert_says

MODELS = """
import torch
from torch import nn
from pipeline.workloads import Workload

class Fine(Workload):
    merit = "score"

    def __init__(self, width: int = 4):
        self.width = width

    def build_model(self):
        return nn.Linear(self.width, 2)

    def synthetic_batch(self, size, device):
        return torch.randn(size, 4, device=device)

    def loss(self, model, batch):
        return model(batch).square().mean()

    def dataset(self):
        return torch.randn(64, 4)

    def evaluate(self, model, device):
        return 0.5

class Bad(Fine):
    unit = ""
    items_per_sample = 0

    def build_model(self):
        return None

    def dataset(self):
        return [torch.zeros(3) for _ in range(64)]

    def learning_rate(self, update):
        return "fast"

class Wrong(Fine):
    better = "more"

    def optimizer(self, model):
        return None

    def dataset(self):
        return torch.randn(3, 4)

    def loss(self, model, batch):
        return batch.mean()

    def learning_rate(self, update):
        return "fast"

    def evaluate(self, model, device):
        return 1 / 0

class Dropping(Fine):
    def before_update(self, model, optimizer):
        optimizer.zero_grad()

class BatchNormed(Fine):
    def build_model(self):
        return nn.Sequential(nn.Linear(self.width, 2), nn.BatchNorm1d(2))

class Leaving(Fine):
    def build_model(self):
        raise SystemExit(0)

class Misspelt(Workload):
    build_model, synthetic_batch, dataset = Fine.build_model, Fine.synthetic_batch, Fine.dataset
    width, items_per_samples, loss_fn = 4, 7, nn.functional.mse_loss

    def loss(self, model, batch):
        return model(batch).square().mean()

    def losses(self):
        pass  # a helper: the class has loss()

    def before_updates(self, model, optimizer):
        1 / 0

    def evalute(self, model, device):
        1 / 0

class Unknown(Fine):
    def evaluate(self, model, device):
        return float("nan")

class Half(Workload):
    def loss(self, model, batch):
        return None

class Broken(Fine):
    def __init__(self):
        raise KeyError("mine")
"""

pytestmark = pytest.mark.training
Check = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Check:
    """The command in this process, which has imported torch; in its own: test_the_example_of_the_docs_is_right."""
    return lambda *words: subprocess.CompletedProcess(words, run_here("check", *words), *capsys.readouterr())


@pytest.fixture
def models(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "models_to_check.py"
    path.write_text(MODELS)
    yield path
    sys.modules.pop(path.stem, None)


REFUSALS = {
    "Bad": [
        "items_per_sample=0 must be a whole number of at least 1",
        "unit='' must be a short text, as in unit = 'tokens'",
        "build_model returns None; return the model, a torch.nn.Module",
        "synthetic_batch gives float32 [4] and the data set float32 [3]; make them alike",
    ],
    "Wrong": [
        "better='more' must be 'higher' or 'lower'",
        "optimizer returns None; return one torch.optim.Optimizer",
        "the data set has 3 samples and the configuration needs 16; lower num_samples",
        "the loss does not call the model; call it once",
        "learning_rate(0) returns 'fast'; return a finite number, or None",
        "ZeroDivisionError: division by zero (at models_to_check.py:56 in evaluate)",
    ],
    "Dropping": ["before_update() leaves no gradient, so updates change nothing"],
    "Broken": ["Broken cannot be built: KeyError: 'mine' (at models_to_check.py:"],
    "Leaving": ["SystemExit: 0 (at models_to_check.py:"],
    "Half": ["Half cannot be built: TypeError: Can't instantiate abstract class Half"],
}


@pytest.mark.parametrize("name", REFUSALS)
def test_each_refusal_of_a_class_is_a_line_and_no_other_hides_it(check: Check, models: Path, name: str) -> None:
    answer = check(f"{models}:{name}")
    found = answer.stdout.splitlines()
    assert [line[:2] for line in found] == ["- "] * len(REFUSALS[name]), answer
    assert [line for line, said in zip(found, REFUSALS[name], strict=True) if not line.startswith(f"- {said}")] == []
    assert answer.returncode == 1
    assert_says(answer.stderr, f"of {models}:{name}; correct the class and check it again.")


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("strategy=fsdp", "precision=bf16"),
        ("strategy=single", "num_gpus=1"),
        ("input=synthetic", "measure=communication"),
    ],
)
def test_a_class_that_is_right_has_the_command_that_runs_it(
    check: Check, models: Path, changes: tuple[str, ...]
) -> None:
    before = everything_in(models.parent)
    answer = check(f"{models}:Fine", *(("--set", *changes) if changes else ()))
    assert (answer.returncode, answer.stderr) == (0, "")
    checked = "build_model, synthetic_batch, loss, optimizer, dataset, evaluate."
    chosen = " ".join([f"model={models}:Fine", *changes])
    assert answer.stdout.splitlines() == [
        f"Nothing is refused of {models}:Fine: {checked}",
        f"Next: python -m pipeline.submit --grid own-model --set {chosen}",
    ]
    assert everything_in(models.parent) == before


NOTICES = {
    "Misspelt": [
        "Notice: no run uses before_updates of Misspelt; did you mean 'before_update'?",
        "Notice: no run uses evalute of Misspelt; did you mean 'evaluate'?",
        "Notice: no run uses items_per_samples of Misspelt; did you mean 'items_per_sample'?",
    ],
    "Unknown": ["Notice: evaluate() of the new model gives no finite number; see what it returns."],
}


@pytest.mark.parametrize("name", NOTICES)
def test_what_may_be_a_mistake_is_said_and_not_refused(check: Check, models: Path, name: str) -> None:
    answer = check(f"{models}:{name}")
    assert (answer.returncode, answer.stderr.splitlines()) == (0, NOTICES[name])
    assert "Nothing is refused" in answer.stdout


def test_what_a_strategy_cannot_place_is_refused_without_its_processes(check: Check, models: Path) -> None:
    answer = check(f"{models}:BatchNormed", "--set", "strategy=fsdp", "precision=bf16")
    assert answer.stdout.startswith("- 1 is a BatchNorm1d, whose statistics are float32")
    assert answer.returncode == 1


def test_the_example_of_the_docs_is_right(pipeline: Command) -> None:
    assert pipeline("check", f"{ROOT / 'docs/examples/gpt/workload.py'}:Arithmetic").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("resnet18",), "'resnet18' is no class of your own; write FILE.py:CLASS"),
        (("none.py:A",), "none.py is no file"),
        (("{models}:None",), "has no class 'None'; choose one of Fine,"),
        (("{models}:Fine", "--set", "model.x=1"), "has no option 'x'; choose one of width."),
        (("{models}:Fine", "--set", "num_gpus=2,4"), "--set has several values of an axis; give one of each."),
        (("{models}:Fine", "--set", "device=cuda"), "there is no GPU here; leave it out, or check on a GPU node."),
        (("{models}:Fine", "--set", "num_gpus=1", "strategy=fsdp"), "strategy='fsdp' shards over GPUs"),
        ((), "FILE.py:CLASS"),
    ],
)
def test_what_cannot_be_checked_is_one_sentence(
    check: Check, models: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = (word.format(models=models) for word in arguments)
    answer = check(*words)
    assert_refused(answer, 2, said)
