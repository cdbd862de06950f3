"""The HTTP service: `fairseq-el serve`. This process does without torch and fairseq, which the worker has."""

import argparse
import importlib
import logging
from pathlib import Path

from fairseq_el import __version__
from fairseq_el.errors import UserError
from fairseq_el.serve.settings import Limits, ModelSettings, ServerSettings

PACKAGES = ("uvicorn", "fastapi", "fastapi_offline", "prometheus_client")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def read_token(path: Path | None) -> str | None:
    if path is None:
        return None
    token = path.read_text(encoding="utf-8").strip()
    if not token or not token.isascii() or any(character.isspace() for character in token):
        raise UserError(f"{path} has no token: write one line of ASCII characters without spaces into it")
    return token


def settings_of(args: argparse.Namespace) -> ServerSettings:
    model = ModelSettings(
        model=args.model, bpe_dir=args.bpe_dir, preset=args.preset, search=args.search,
        precisions=tuple(args.precision), cpu=args.cpu, seed=args.seed, threads=args.threads, changes=args.changes,
    )  # fmt: skip
    names = ("queue", "texts", "body_bytes", "beam", "max_len", "timeout")
    limits = Limits(**{name: getattr(args, f"limit_{name}") for name in names}, batch_wait=args.batch_wait / 1000)
    return ServerSettings(args.host, args.port, model, limits, read_token(args.token_file), __version__)


def main(args: argparse.Namespace) -> None:
    """args: of `options.serve`."""
    logging.basicConfig(format="serve: warning: %(message)s", level=logging.WARNING, force=True)
    for name in PACKAGES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            raise UserError(f"{name} is not installed: pip install 'fairseq_el[serve]'") from None
    settings = settings_of(args)
    if settings.host not in LOOPBACK and settings.token is None:
        logging.warning(f"whoever reaches {settings.host} can use this server: --token-file asks clients for a token")
    importlib.import_module("fairseq_el.serve.server").run(settings)
