"""Options of a client for S3 from the files of AWS's own programs."""

from __future__ import annotations

import configparser
import os
from pathlib import Path

from effloop.data.remote.environment import ENDPOINTS, check_endpoint, check_value
from effloop.data.remote.location import Location
from effloop.errors import ConfigError


def aws_options(location: Location) -> dict[str, str]:
    """What `~/.aws` says, as AWS's own programs have it, where the environment has no keys: obstore doesn't read it.

    Raises:
        ConfigError: a file there can't be read, or says what can't be used.
    """
    if not location.scheme.startswith("s3") or "AWS_ACCESS_KEY_ID" in os.environ:
        return {}
    profile = os.environ.get("AWS_PROFILE", "default")
    found: dict[str, str] = {}
    for variable, name, section in (
        ("AWS_CONFIG_FILE", "config", profile if profile == "default" else f"profile {profile}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", profile),
    ):
        parser = configparser.RawConfigParser()
        path = Path(os.environ.get(variable) or Path.home() / ".aws" / name)
        try:
            parser.read(path)
        except configparser.Error:
            raise ConfigError(f"data.root: {path} can't be read; correct it, or set AWS_ACCESS_KEY_ID") from None
        if parser.has_section(section):
            found |= dict(parser.items(section))
    names = {
        "aws_access_key_id": "access_key_id",
        "aws_secret_access_key": "secret_access_key",
        "aws_session_token": "session_token",
        "region": "region",
        "endpoint_url": "endpoint",
    }
    variables = {"region": ("AWS_REGION", "AWS_DEFAULT_REGION"), "endpoint_url": ENDPOINTS}
    for name in names.keys() & found.keys():
        check = check_endpoint if name == "endpoint_url" else check_value
        check(f"{name} of profile {profile}", found[name])
    return {
        option: found[name]
        for name, option in names.items()
        if name in found and not any(each in os.environ for each in variables.get(name, ()))
    }
