"""What a remote `data.root` names."""

import pytest

from effloop.data.remote.location import Location, is_remote, local_name, redacted
from effloop.errors import ConfigError


@pytest.mark.parametrize(
    ("root", "names", "base"),
    [
        ("s3://b/in-{train,val}-{008..010}.tar", 6, ""),
        ("https://h:80/a/{train/x-{0..3},val/y}.tar", 5, "a/"),
        ("s3://b/{a..z}{one}.tar", 1, ""),  # neither is a choice
        ("gs://b/p/q.tar", 1, "p/"),
    ],
)
def test_braces_are_expanded_as_by_a_shell(root, names, base):
    location = Location.of(root)
    assert (len(location.names), location.base) == (names, base)


def test_numbers_keep_their_zeros():
    assert [*Location.of("s3://b/{08..11}-{1..2}").names][:3] == ["08-1", "08-2", "09-1"]


@pytest.mark.parametrize(
    ("root", "inside", "outside"),
    [
        ("s3://b/p/*.tar", "p/a.tar", "p/q/a.tar"),
        ("s3://b/p/**/*.tar", "p/q/r/a.tar", "q/a.tar"),
        ("s3://b/x-[0-9]?.tar", "x-0a.tar", "x-ab.tar"),
        ("s3://b/{a,b}.tar", "b.tar", "c.tar"),
        ("s3://b/x[!a]y", "xby", "xay"),
    ],
)
def test_wildcards_stay_in_a_folder(root, inside, outside):
    location = Location.of(root)
    assert location.matches(inside)
    assert not location.matches(outside)


@pytest.mark.parametrize(
    "root",
    [
        "https://me:hidden@h/x",
        "https://me@h/x",
        "https://h/x.tar?sig=hidden",
        "s3://key:hidden@b/x",
        "az://c/x?sv=1&sig=hidden",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_shown(root):
    with pytest.raises(ConfigError, match=r"^data\.root: .*environment") as error:
        Location.of(root)
    assert "hidden" not in str(error.value)


def test_what_is_secret_is_taken_out_of_messages(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "abcdefgh")
    text = redacted("GET https://u:pw@h/x?X-Amz-Signature=00 failed\n with abcdefgh")
    assert text == "GET https://***@h/x?*** failed with ***"


@pytest.mark.parametrize("value", ["Bearer abcdefgh", "Bearer abcdefgh\n"])
def test_a_token_is_secret_without_the_word_before_it(value, monkeypatch):
    monkeypatch.setenv("EFFLOOP_HTTP_AUTHORIZATION", value)
    assert redacted("refused: abcdefgh, of Bearer abcdefgh") == "refused: ***, of ***"


def test_a_path_is_not_remote():
    assert [is_remote(root) for root in (None, "", "/a/b", "a://b", "s3://b", "file:///x")] == [False] * 3 + [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("root", ["s3://", "https:///x", "s3://b/{0..9999999}", "https://h/\udcff"])
def test_bad_roots_are_one_line(root):
    with pytest.raises(ConfigError, match=r"^data\.root: '"):
        _ = Location.of(root).names


def test_a_wrong_pattern_is_refused():
    with pytest.raises(ConfigError, match=r"^data\.root: 's3://b/a\*\*.tar' has a wrong pattern: Invalid"):
        Location.of("s3://b/a**.tar").matches("0.tar")


def test_numbers_without_end_are_no_range():
    assert len(Location.of("s3://b/{0.." + "9" * 5000 + "}").names) == 1


@pytest.mark.parametrize(
    ("root", "name"),
    [
        ("s3://b/a/in1k", "in1k"),
        ("https://h:80/my%20pets/{train,val}-*.tar", "my-pets"),
        ("https://h:80/", "h-80"),
        ("s3://b*/", "data"),
    ],
)
def test_a_copy_here_has_a_plain_name(root, name):
    assert local_name(root) == name
