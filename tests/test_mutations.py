import pytest
from run_mutations import ROOT, Mutation, OldTextNotUnique, load_mutations

MUTATION = Mutation("name", "file.py", "a + b", "a - b", "tests/test_file.py::test_sum")


def test_a_mutation_replaces_its_old_text() -> None:
    assert MUTATION.apply("return a + b\n") == "return a - b\n"


@pytest.mark.parametrize(("text", "problem"), [("b + a", "old text not found"), ("a + b, a + b", "found 2 times")])
def test_an_old_text_that_is_not_there_exactly_once_is_an_error(text: str, problem: str) -> None:
    with pytest.raises(OldTextNotUnique, match=problem):
        MUTATION.apply(text)


def test_each_mutation_changes_a_file_that_there_is_and_names_a_test_that_there_is() -> None:
    for mutation in load_mutations():
        text = (ROOT / mutation.file).read_text()
        assert mutation.apply(text) != text, mutation
        path, function = mutation.test.partition("[")[0].split("::")
        assert f"\ndef {function}(" in (ROOT / path).read_text(), mutation
