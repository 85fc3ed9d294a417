"""`audit`: what is wrong with a dataset, before a model learns it."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from effloop import config as configs
from effloop.assemble.environment import num_workers
from effloop.audit.findings import KINDS, Finding
from effloop.cli.command import command
from effloop.cli.convert import open_all
from effloop.config.overrides import quoted
from effloop.errors import PROGRAM
