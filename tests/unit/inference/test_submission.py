"""What a column of a submission holds, by the values of a sample file."""

import pytest

from effloop.data.source.files import Images
from effloop.errors import ConfigError
from effloop.inference.submission import contents, ids_of
from effloop.task import tasks

AB, ABC = ("a", "b"), ("a", "b", "c")


@pytest.mark.parametrize(
    ("task", "names", "columns", "values", "taken", "written"),
    [
        ("classification", ABC, "label", "", ["class"], {"b": "b"}),
        ("classification", ABC, "label", "a", ["class"], {"b": "b"}),
        ("classification", ABC, "label", "0", ["class"], {"a": "0", "c": "2"}),
        ("classification", ("3", "7", "12"), "label", "0", ["class"], {"12": "12"}),
        ("classification", ("0", "1"), "label", "0 1", ["class"], {"1": "1"}),
        ("classification", AB, "label", "0.5", ["p_b"], {}),
        ("classification", ("0", "1"), "target", "0.5", ["p_1"], {}),
        ("classification", ABC, "c a b", "0.3", ["p_c", "p_a", "p_b"], {}),
        ("classification", ("class", "score"), "score class", "0.3", ["p_score", "p_class"], {}),
        ("multilabel", ABC, "labels", "0 1/1", "has '0 1' in 'labels'; write labels (a, b, c) with one of", {}),
        ("multilabel", ABC, "labels", "a|c", ["labels"], {"b|c": "b|c"}),
        ("multilabel", ABC, "labels", "a/a b", ["labels"], {"b|c": "b c"}),
        ("multilabel", ABC, "b a c", "0", ["p_b", "p_a", "p_c"], {}),
        ("regression", ("price",), "SalePrice", "0", ["price"], {}),
        ("regression", ("x", "y"), "y x", "0", ["y", "x"], {}),
        ("classification", ABC, "label", "x", "has 'x' in 'label', no class (a, b, c) and no number of one, 0 to", {}),
        ("classification", ABC, "label", "3", "has '3' in 'label'", {}),
        ("classification", ABC, "a b", "0", "has the columns id,a,b; give it one for ids, and one for what is", {}),
        ("regression", ("x", "y"), "y", "0", "has the columns id,y; give it one for ids, and each of x,y", {}),
    ],
)
def test_contents(task, names, columns, values, taken, written):
    header = ["id", *columns.split()]
    texts = [{*(values.split("/") if "/" in values else values.split())}] * (len(header) - 1)
    made = tasks.build(tasks[task].config(name=task)).for_outputs(len(names))
    if isinstance(taken, str):
        with pytest.raises(ConfigError) as caught:
            contents(made, names, header, texts, "it")
        assert taken in str(caught.value)
        return
    found, encode, _ = contents(made, names, header, texts, "it")
    assert found == taken
    assert {text: encode(text) for text in written} == written


def test_names_below_the_folder_of_all():
    images = Images([b"test/007.png", b"test/a,b.c.png", b"test/sub/007.png"], "test")
    assert ids_of(images, "stem") == ["007", "a,b.c", "007"]
    assert ids_of(images, "stem", 0) == ["007", "a,b.c", "sub/007"]
    assert ids_of(images, "name", 2) == ["test/007.png", "test/a,b.c.png", "sub/007.png"]
