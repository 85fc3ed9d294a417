"""`launch`: the file that runs a training on a cluster or in a cloud."""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from effloop import config as configs
from effloop.cli.command import command
from effloop.config import Config
from effloop.config.compose import searchpath
from effloop.config.overrides import is_sweep, key_of, only_shows, parse_flags, quoted
from effloop.errors import PROGRAM, ConfigError, check_value
from effloop.registry import plugin_words
from effloop.system.files import explained_writing, write_text

TOOLS = {
    "slurm": ("slurm.sh", "sbatch OPTIONS FILE"),
    "skypilot": ("skypilot.yaml", "sky jobs launch OPTIONS FILE"),
    "kubernetes": ("kubernetes.yaml", "kubectl apply OPTIONS -f FILE"),
    "ray": ("ray.py", "ray job submit --working-dir . OPTIONS -- python FILE"),
}
"""What `to=` takes -> the template, in templates/ without its .j2, and the command that takes the file."""
_TAKERS = {"time": ("slurm",), "image": ("skypilot", "kubernetes"), "storage": ("skypilot", "kubernetes")}
_LEAST_MIN = 4  # Slurm's signal, 120 s before the end, may come a minute earlier: a job would begin again and again
_OUT = "/storage/outputs"  # where `out` is, if it isn't typed, with a template that mounts `storage`


@dataclass(frozen=True)
class LaunchOptions:
    """Options of `launch`.

    Attributes:
        to: what the file is for.
        nodes: machines.
        gpus: GPUs of each machine, a rank for each: 8, or with their type H100:8; 0 is one rank, on the CPU.
        cpus: cores of each machine; without it as many as the tool gives.
        memory: GiB of each machine; without it as much as the tool gives.
        time: slurm: [DAYS-]HH:MM:SS, after which the run is saved and its job queued again; 24:00:00 without it.
        image: skypilot, kubernetes: a container image that has EffLoop.
        storage: skypilot: a bucket's URL; kubernetes: a PersistentVolumeClaim. It is /storage there, where the run
            folder is.
        options: words for the tool's own command, such as '--partition=a100 --account=me' for sbatch.
        file: what is written; without it the run's name, with an ending of the tool's.
        submit: hand the file to the tool.
    """

    to: Literal["slurm", "skypilot", "kubernetes", "ray"]
    nodes: Annotated[int, range(1, 10_001)] = 1
    gpus: str = "1"
    cpus: Annotated[int, range(1, 10_001)] | None = None
    memory: Annotated[int, range(1, 100_001)] | None = None
    time: str | None = None
    image: str | None = None
    storage: str | None = None
    options: str | None = None
    file: Path | None = None
    submit: bool = False

    def __post_init__(self) -> None:
        for name, takers in _TAKERS.items():
            given = getattr(self, name) is not None
            if given and self.to not in takers:
                raise ConfigError(f"{name}: to={self.to} doesn't take it; drop it, or set to={' or to='.join(takers)}")
            if not given and self.to in takers and name != "time":
                raise ConfigError(f"launch: to={self.to} needs {name}=; see {PROGRAM} launch --help")
        form = re.fullmatch(r"([A-Za-z][\w.-]*:)?\d{1,3}", self.gpus)
        check_value("gpus", self.gpus, form is not None, "N or TYPE:N, e.g. 8 or H100:8")
        typed = ":" in self.gpus or self.gpus == "0"
        check_value("gpus", self.gpus, typed or self.to != "skypilot", "TYPE:N for SkyPilot, e.g. H100:8")
        plain = ":" not in self.gpus
        check_value("gpus", self.gpus, plain or self.to != "kubernetes", "N for Kubernetes, without a type")
        form = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):\d\d", self.time or "24:00:00")
        check_value("time", self.time, form is not None, "[DAYS-]HH:MM:SS, e.g. 24:00:00")
        days, hours, minutes = map(int, form.groups("0") if form else "000")
        longer = (24 * days + hours) * 60 + minutes >= _LEAST_MIN
        check_value("time", self.time, longer, f"{_LEAST_MIN} minutes or more: SIGUSR1 comes 2 before the end")

    def submits(self, command: str, file: Path) -> list[str]:
        """A command of `TOOLS`, filled in."""
        try:
            filled = {"OPTIONS": shlex.split(self.options or ""), "FILE": [str(file)]}
        except ValueError as error:
            raise ConfigError(f"options: {self.options} is not what a shell takes: {error}") from None
        return [word for each in command.split() for word in filled.get(each, [each])]


@command("launch", LaunchOptions, "to=slurm nodes=2 gpus=8 data.root=/data/pets run=pets")
def launch(options: LaunchOptions, words: list[str]) -> int:
    """Write the file that runs a training on a cluster or in a cloud.

    It is for Slurm, SkyPilot, Kubernetes (Kubeflow's TrainJob) or Ray. A run that is stopped goes on in its folder.
    """
    gpu_type, _, gpus = options.gpus.rpartition(":")
    ranks = max(int(gpus), 1)
    words, config = _words(options, words, options.nodes * ranks)
    slug = re.sub(r"[^a-z0-9]+", "-", config.run.lower()).strip("-")
    name = (slug if slug[:1].isalpha() else f"run-{slug}")[:40].strip("-")  # as Kubernetes takes it, the strictest
    template, command = TOOLS[options.to]
    file = options.file or Path(f"{name}.{template}")
    submit = options.submits(command, file)
    values = {"name": name, "gpus": int(gpus), "gpu_type": gpu_type, "ranks": ranks, "words": words}
    values["virtual"] = getattr(config.parallel, "virtual", None)
    text = _render(template, {**vars(options), **values})
    with explained_writing("file", file, "set file=FILE"):
        if file.exists() and file.read_bytes() != text.encode():
            raise ConfigError(f"file: {file} is there already, with other text; remove it, or set file=ANOTHER")
        write_text(file, text)
    print(f"{text}file: {file}   submit: {shlex.join(submit)}", flush=True)
    try:
        return subprocess.run(submit, check=False).returncode if options.submit else 0
    except OSError as error:
        fix = f"install it, or submit {file} where it is"
        raise ConfigError(f"submit: {submit[0]} can't be run here: {error.strerror}; {fix}") from None


def _words(options: LaunchOptions, words: list[str], ranks: int) -> tuple[list[str], Config]:
    """What follows `effloop` in the file, checked as far as that needs no data; and its config."""
    flags, overrides = parse_flags(words)
    if is_sweep(flags) or only_shows(flags):
        raise ConfigError(f"launch: {' '.join(flags)}: a file is of a single run; a sweep starts its jobs itself")
    if odd := [word for word in words if not word.replace("\n", " ").isprintable()]:
        raise ConfigError(f"launch: {odd[0]!r} has a character that no file of text should have; leave it out")
    typed = {key_of(each) for each in overrides}
    if options.storage and "out" not in typed:
        overrides = [*overrides, f"out={_OUT}"]
    config = configs.compose([*overrides, *searchpath(flags)])
    if ranks > 1 and not config.parallel.of_ranks and "parallel" not in typed:
        overrides = [*overrides, "parallel=ddp"]
        config = configs.compose([*overrides, *searchpath(flags)])
    if ranks > 1 and not config.parallel.of_ranks:
        of = f"nodes={options.nodes} gpus={options.gpus} are {ranks} ranks"
        raise ConfigError(f"parallel={config.parallel.name} is a single process, but {of}; set parallel=ddp or gpus=1")
    if config.resume not in (None, "auto"):
        raise ConfigError(f"resume: each start goes on by resume=auto, not from {config.resume}; leave it out")
    if options.to == "ray" and not Path(config.out).is_absolute():
        raise ConfigError(f"out: '{config.out}' would be in Ray's copy of this folder; set out=/FOLDER that all share")
    # Each start has to find the same folder: a name with the time in it stays what it is now.
    plain = re.fullmatch(r"[\w./-]+", config.run, re.ASCII)
    run = [each for each in overrides if key_of(each) == "run" and "${" not in each]
    run = run or [f"run={config.run if plain else quoted(config.run)}"]
    kept = [each for each in overrides if key_of(each) not in ("run", "resume")]
    return [*plugin_words(), *flags, *kept, *run, "resume=auto"], config


def _render(template: str, values: dict[str, Any]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    # No HTML: each template quotes for its own language. StrictUndefined: a name that is wrong is an error.
    jinja = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)  # noqa: S701
    jinja.loader = PackageLoader("effloop.cli")
    jinja.filters |= {"shell": shlex.join, "yaml": _to_yaml, "unexpanded": _unexpanded, "python": repr}
    return jinja.get_template(f"{template}.j2").render(values)


def _unexpanded(words: list[str]) -> list[str]:
    """In a container's command Kubernetes replaces $(NAME), and $$ by $."""
    return [re.sub(r"\$(?=[$(])", "$$", word) for word in words]


def _to_yaml(value: Any) -> str:
    return yaml.safe_dump(value, allow_unicode=True, width=10_000).removesuffix("...\n").strip("\n")
