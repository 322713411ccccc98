"""Show a configuration as the other commands read it.

    mesh-mpi config runs/quickstart.yaml mesh_shape=data:2      includes, overrides and defaults resolved
    mesh-mpi config --defaults > run.yaml                       every key, its default and what it means; a file to start from

What is printed is YAML that gives the same configuration when it is loaded.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import tokenize
import typing
from typing import NamedTuple

EXAMPLE = "runs/quickstart.yaml"  # its values stand for the keys that have no default


ONE_PROCESS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``mesh-mpi config``."""
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="a YAML file, here or one that comes with the package")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="set a key of the configuration, dotted: train.steps=10")
    parser.add_argument("--defaults", action="store_true", help="print every key with its default and a comment")


def run(arguments: argparse.Namespace) -> int:
    """Print the configuration."""
    from mesh_mpi import config as cfg
    from mesh_mpi.errors import ConfigError

    if arguments.defaults == (arguments.config is not None):
        found = f"--defaults and {arguments.config}" if arguments.defaults else "neither a file nor --defaults"
        raise ConfigError(f"config: {found} were given. Give one: config FILE [key=value...], or config --defaults.")
    print(defaults() if arguments.defaults else cfg.to_yaml(cfg.load(arguments.config, arguments.overrides)), end="")
    return 0


class Key(NamedTuple):
    """What the schema says about a key: its comment, and whether it has no default."""

    comment: str
    required: bool


def defaults() -> str:
    """Return a whole configuration as YAML with a comment a key: defaults, and the example's values for keys without one."""
    from mesh_mpi import config as cfg
    from mesh_mpi import config_schema as schema

    example = cfg.load(EXAMPLE)
    form = next(form for form in schema.BATCH_FORMS if getattr(example, form) is not None)
    keys, docs = documentation(schema)
    least = {"model": {name: getattr(example.model, name) for name, key in keys["Model"].items() if key.required}, form: getattr(example, form)}

    def blocks(**section) -> dict[str, list[str]]:
        return _blocks(cfg.to_yaml(cfg.parse({**least, **section})))

    lines = ["# Every key with its default, and what it means. No default: the value is that of " + EXAMPLE + ".",
             "# A key that is left out has its default. With \"include: other.yaml\" (a path from this file, or one of the package's own, or a list) "
             "that file's keys lie underneath: keys here come before its own, so delete those that it shall set."]
    for key, block in blocks().items():
        value = getattr(cfg.parse(least), key)
        kind = type(value).__name__ if isinstance(value, schema.Section) else None
        if kind is None:
            comment = f"exactly one of the four is given; {keys['Config'][key].comment}" if key in schema.BATCH_FORMS else keys["Config"][key].comment
            lines.append(_commented(block[0], comment.rstrip("; ")))
            continue
        lines += ["", *(f"# {line}" for line in docs[kind]), *_section(block, keys[kind])]
        for other in typing.get_args({"optimizer": schema.Optimizer, "schedule": schema.Schedule}.get(key)):
            if not isinstance(value, other):
                name = other.__name__
                lines += ["#", *(f"# or {line}" if i == 0 else f"#    {line}" for i, line in enumerate(docs[name]))]
                lines += [f"# {line}" for line in _section(blocks(**{key: {"name": other.name}})[key], keys[name])]
    return "\n".join(lines) + "\n"


def documentation(schema) -> tuple[dict[str, dict[str, Key]], dict[str, list[str]]]:
    """Return the keys of each class of the schema, and the lines of its docstring, from the schema's source."""
    source = inspect.getsource(schema)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokenize.generate_tokens(io.StringIO(source).readline)
                if token.type == tokenize.COMMENT}
    keys, docs = {}, {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            docs[node.name] = [line.replace("``", "") for line in (ast.get_docstring(node) or "").splitlines() if line]
            keys[node.name] = {field.target.id: Key(comments.get(field.end_lineno, ""), field.value is None)
                               for field in node.body if isinstance(field, ast.AnnAssign)}
    return keys, docs


def _blocks(text: str) -> dict[str, list[str]]:
    """Return the lines of each top-level key of YAML in block style."""
    blocks: dict[str, list[str]] = {}
    for line in text.splitlines():
        if not line.startswith(" "):
            blocks[line.split(":")[0]] = []
        blocks[next(reversed(blocks))].append(line)
    return blocks


def _section(block: list[str], keys: dict[str, Key]) -> list[str]:
    """Return the lines of a section with their comments."""
    lines = block[:1]
    for line in block[1:]:
        name = line.split(":")[0].strip()
        key = Key("", False) if name == "name" else keys[name]
        lines.append(_commented(line, "; ".join(filter(None, [key.comment, "no default" if key.required else ""]))))
    return lines


def _commented(line: str, comment: str) -> str:
    return f"{line}  # {comment}" if comment else line
