"""Hydra's command line on the Pythons that it wasn't written for."""

from __future__ import annotations

import argparse

import pytest

from effloop.cli.main import main
from effloop.config import hydra_app


def check_help(self: argparse.ArgumentParser, action: argparse.Action) -> None:
    """As Python 3.14 has it."""
    if action.help:
        try:
            self._get_formatter()._expand_help(action)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError("badly formed help string") from error


@pytest.fixture
def python_3_14(monkeypatch: pytest.MonkeyPatch) -> None:
    """argparse checks each help as it is added, as it does since Python 3.14."""
    add_argument = argparse.ArgumentParser.add_argument

    def add(self: argparse.ArgumentParser, *names: str, **options: object) -> argparse.Action:
        action = add_argument(self, *names, **options)
        self._check_help(action)
        return action

    monkeypatch.setattr(argparse.ArgumentParser, "_check_help", check_help, raising=False)
    monkeypatch.setattr(argparse.ArgumentParser, "add_argument", add)


@pytest.mark.usefixtures("python_3_14", "here")
class TestPython314:
    def test_hydras_own_parser_is_refused(self) -> None:
        """Once it isn't, what EffLoop does about it can go."""
        from hydra._internal.utils import get_args_parser

        with pytest.raises(ValueError, match="badly formed help string"):
            get_args_parser()

    def test_hydras_flags(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Not `--info`, after which Hydra logs to this test's output for as long as the process lives."""
        assert main(["--cfg", "job", "--package", "optim", "optim.lr=0.5"]) == 0
        assert "lr: 0.5" in capsys.readouterr().out

    def test_other_help_is_checked_as_ever(self) -> None:
        def bad() -> None:
            argparse.ArgumentParser().add_argument("--share", help="100% of it")

        with hydra_app._help_of_any_type(), pytest.raises(ValueError, match="badly formed"):
            bad()
        with pytest.raises(ValueError, match="badly formed"):
            argparse.ArgumentParser().add_argument("--lazy", help=object())
        assert argparse.ArgumentParser._check_help is check_help
