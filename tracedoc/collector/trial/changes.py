"""What a change sets in a running job, read from the text that is printed for people to paste.

The text is the change: nothing else says what a fix does. A call such as ``DDP(model, bucket_cap_mb=25)``
replaces these keywords wherever the job makes that call; ``export NAME=VALUE`` sets a variable; a JSON object
is merged into the job's DeepSpeed configuration. What only the script's own code can change is refused, with
the reason.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class CannotError(Exception):
    """A change that cannot be applied from outside the script; its text says why."""


@dataclass(frozen=True, slots=True)
class Home:
    """Where a call lives, and what of a manifest's ``framework`` shows that the job makes it."""

    modules: tuple[str, ...]
    name: str
    shown_by: str = ""


DDP_HOME = Home(("torch.nn.parallel.distributed",), "DistributedDataParallel", "ddp")
_OPTIMIZERS = "torch.optim"
HOMES = {
    "DDP": DDP_HOME,
    "DistributedDataParallel": DDP_HOME,
    "DistributedDataParallelKwargs": DDP_HOME,
    "DDPStrategy": DDP_HOME,
    "DataLoader": Home(("torch.utils.data.dataloader",), "DataLoader", "loaders"),
    "FSDP": Home(
        ("torch.distributed.fsdp.fully_sharded_data_parallel",), "FullyShardedDataParallel", "fsdp1"
    ),
    "fully_shard": Home(("torch.distributed.fsdp._fully_shard._fully_shard",), "fully_shard", "fsdp2"),
    "TrainingArguments": Home(("transformers.training_args",), "TrainingArguments", "trainer"),
    "Trainer": Home(
        ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer"), "Trainer", "lightning"
    ),
    "Accelerator": Home(("accelerate.accelerator",), "Accelerator", "accelerate"),
    "DataLoaderConfiguration": Home(
        ("accelerate.utils.dataclasses",), "DataLoaderConfiguration", "accelerate"
    ),
    "to": Home(("torch",), "Tensor"),
}
"""Calls whose keywords can be replaced, as changes write them; others pass on to DDP what they are given."""

DEEPSPEED_HOME = Home(("deepspeed.runtime.config",), "DeepSpeedConfig", "deepspeed")
LAUNCH_HOME = Home(("accelerate.commands.config.config_args",), "load_config_from_file")

STEP, MODEL, TORCH = "step", "model", "torch"
"""When code runs: after every step, once the model is there, once torch is."""

_GIVEN = frozenset({"torch", "gc", "os", "model", "step", "rank", "local_rank", "world_size"})
_OF_SHARDING = frozenset(
    {
        "BackwardPrefetch",
        "CPUOffload",
        "CPUOffloadPolicy",
        "MixedPrecision",
        "MixedPrecisionPolicy",
        "ShardingStrategy",
    }
)
_SETTERS = re.compile(r"set_\w+|sched_setaffinity|register_comm_hook|collect|freeze|disable|enable")
_ONLY_SHOWS = frozenset({"set_sync_debug_mode", "TORCH_LOGS", "NCCL_DEBUG", "TORCH_DISTRIBUTED_DEBUG"})
_BATCH = re.compile(r"batch_size|accumulat|grad_batches")
_INSTEAD = re.compile(r"#.*\binstead of\b")
_WITHOUT = re.compile(r"#.*\bwithout (\w+)")
_VARIABLE = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)
_SHORTER = re.compile(r"bf16|bfloat16|fp16|float16|half|tf32|'high'|\"high\"|'medium'", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Call:
    """Keywords that replace those of every call of ``target``, as source; "" takes one out.

    ``before`` runs first, for the names in them.
    """

    target: str
    keywords: tuple[tuple[str, str], ...]
    before: str = ""

    @property
    def home(self) -> Home:
        """Where the call lives."""
        if self.target.startswith(_OPTIMIZERS):
            return Home((_OPTIMIZERS,), self.target.rpartition(".")[2], "optimizers")
        return HOMES[self.target]


@dataclass(frozen=True, slots=True)
class Code:
    """Statements that set something by themselves, and when they run."""

    source: str
    when: str

    @property
    def part(self) -> str:
        """What stands for it: its last line."""
        return self.source.rpartition("\n")[2].strip()


@dataclass(frozen=True)
class Change:
    """All that a text sets: each field is empty where it sets nothing of that kind."""

    text: str
    environ: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    launch: Mapping[str, Any] = field(default_factory=dict)
    calls: tuple[Call, ...] = ()
    code: tuple[Code, ...] = ()
    compile: str | None = None
    compiles_units: bool = False
    no_sync: bool = False

    @property
    def parts(self) -> Iterator[tuple[str, Home | None]]:
        """What has to be met in the job for the change to be made, each with where it lives."""
        for call in self.calls:
            yield call.target, call.home
        for code in self.code:
            yield code.part, None
        if self.deepspeed:
            yield "DeepSpeed configuration", DEEPSPEED_HOME
        if self.launch:
            yield "accelerate configuration", LAUNCH_HOME
        if self.compile is not None:
            yield "torch.compile", HOMES["fully_shard"] if self.compiles_units else None
        if self.no_sync:
            yield "no_sync", DDP_HOME

    @property
    def modules(self) -> set[str]:
        """The modules whose import is to be watched."""
        found = {module for _, home in self.parts if home is not None for module in home.modules}
        early = {TORCH: ("torch",), MODEL: DDP_HOME.modules, STEP: ()}
        return found.union(*(early[code.when] for code in self.code))

    @property
    def rounds(self) -> bool:
        """True for a change that computes or sends with fewer bits, which losses show."""
        return _SHORTER.search(self.text) is not None

    @property
    def draws_anew(self) -> bool:
        """True for a change after which other processes load: samples drawn at random are other ones."""
        return any(
            call.target == "DataLoader" or name.startswith("dataloader")
            for call in self.calls
            for name, _ in call.keywords
        )

    def missing_in(self, framework: Mapping[str, Any]) -> str:
        """The first part that a job has nothing of, "" for none; ``framework`` is from a manifest."""
        if not framework:
            return ""
        shown = {"deepspeed": ("deepspeed", "accelerate")}
        for target, home in self.parts:
            kinds = shown.get(home.shown_by, (home.shown_by,)) if home and home.shown_by else ()
            if kinds and not any(framework.get(kind) for kind in kinds):
                return target
        return ""


def read_change(text: str) -> Change:
    """What a printed change sets; raises :class:`CannotError` for one that only the script can make."""
    change = _read(text.strip())
    code = re.findall(r"\w+", " ".join(one.source for one in change.code))
    if shows := _ONLY_SHOWS.intersection([*change.environ, *code]):
        raise CannotError(f"{min(shows)} shows where time goes, and saves none")
    set_names = [*(name for call in change.calls for name, _ in call.keywords), *change.deepspeed]
    if any(map(_BATCH.search, set_names)):
        raise CannotError("it changes the batch, and so what a step is")
    return change


def _read(text: str) -> Change:
    if not text:
        raise CannotError("it is advice in words")
    if text.startswith("{"):
        try:
            return Change(text, deepspeed=dict(json.loads(text)))
        except ValueError:
            raise CannotError("its JSON cannot be read") from None
    if re.match(r"\w+_config:\n", text):
        return Change(text, launch=_two_levels(text))
    shell = _shell(text)
    return shell if shell is not None else _python(text)


def _two_levels(text: str) -> dict[str, Any]:
    """The mappings of a few indented lines, as accelerate's configuration has them."""
    found: dict[str, Any] = {}
    section: dict[str, Any] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if not line.startswith(" "):
            section = found.setdefault(name.strip(), {})
        elif value.strip():
            words = {"true": True, "false": False}
            value = value.strip()
            section[name.strip()] = words.get(value, int(value) if value.isdecimal() else value)
    return found


def _shell(text: str) -> Change | None:
    """What lines for a shell set; ``None`` where they are none."""
    environ: dict[str, str] = {}
    unset: list[str] = []
    arguments: list[str] = []
    for line in text.splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            return None
        if words[:1] == ["unset"]:
            unset += words[1:]
        elif words[:1] == ["export"] or (words and _VARIABLE.fullmatch(words[0])):
            pairs = [_VARIABLE.fullmatch(word) for word in words]
            environ |= {pair[1]: pair[2] for pair in pairs if pair}
        elif words and words[0].startswith("--"):
            arguments += words
        elif words and re.fullmatch(r"[a-z][\w-]*", words[0]) and len(words) > 1 and _is_command(words):
            raise CannotError(f"{words[0]} is a command for a shell, no setting of the job")
        elif words:
            return None
    return Change(text, environ=environ, unset=tuple(unset), arguments=tuple(arguments))


def _is_command(words: Sequence[str]) -> bool:
    return words[1][0] in "-/" or words[0] in ("docker", "tracedoc", "torchrun", "accelerate", "ethtool")


def _python(text: str) -> Change:
    try:
        statements = ast.parse(text).body
    except SyntaxError:
        raise CannotError("it is no setting that can be read") from None
    if _INSTEAD.search(text):
        raise CannotError("it takes the place of code of the script")
    before: list[str] = []
    known: set[str] = set()
    calls: list[Call] = []
    code: list[Code] = []
    compiled: str | None = None
    no_sync = units = False
    for statement in statements:
        if _names_of_attributes(statement) & {"no_sync", "accumulate"}:
            no_sync = True
            continue
        source, assigned = ast.unparse(statement), _assigned(statement)
        unknown = _unknown(statement, known)
        if _compiles_each(statement):
            compiled, units = "", True
            continue
        own = list(_calls(statement, known, "\n".join(before)))
        if own and (without := _WITHOUT.search(text)):
            own = [Call(call.target, (*call.keywords, (without[1], "")), call.before) for call in own]
        calls += own
        arguments = _compile_arguments(statement)
        compiled = arguments if arguments is not None else compiled
        if own or arguments is not None or _is_plain_call(statement):
            continue
        if isinstance(statement, ast.Import | ast.ImportFrom | ast.FunctionDef):
            before.append(source)
            known |= assigned
        elif not unknown and _only_sets(statement):
            names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            when = (
                STEP
                if "step" in names
                else MODEL
                if names & {"model", "local_rank"} or known & names
                else TORCH
            )
            code.append(Code("\n".join([*before, source]), when))
        elif not unknown and isinstance(statement, ast.Assign):
            before.append(source)
            known |= assigned
        else:
            raise CannotError(_by_hand(unknown))
    if not (calls or code or no_sync) and compiled is None:
        raise CannotError(_by_hand(set()))
    if no_sync:
        calls = [call for call in calls if call.target != "Accelerator"]
    return Change(text, calls=tuple(calls), code=tuple(code), compile=compiled,
                  compiles_units=units, no_sync=no_sync)  # fmt: skip


def _by_hand(unknown: set[str]) -> str:
    names = ", ".join(sorted(unknown)[:3])
    return f"it changes the script's own code{f' ({names})' if names else ''}"


def _names_of_attributes(statement: ast.stmt) -> set[str]:
    return {node.attr for node in ast.walk(statement) if isinstance(node, ast.Attribute)}


def _assigned(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
    if isinstance(statement, ast.FunctionDef):
        return {statement.name}
    return {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _unknown(node: ast.AST, known: set[str]) -> set[str]:
    """The names that only the script can give a value."""
    own = {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
    if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef):
        own |= _assigned(node)
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    return names - known - own - _GIVEN - _OF_SHARDING - set(dir(builtins)) - set(HOMES)


def _calls(statement: ast.stmt, known: set[str], before: str) -> Iterator[Call]:
    """The calls in a statement that give keywords; ``name=name`` stands for what the script has."""
    for node in ast.walk(statement):
        if not isinstance(node, ast.Call) or (target := _target(node.func)) is None:
            continue
        keywords = []
        for keyword in node.keywords:
            if target == "to" and keyword.arg != "non_blocking":
                raise CannotError(_by_hand(set()))
            inner = any(isinstance(n, ast.Call) and _target(n.func) for n in ast.walk(keyword.value))
            stays = isinstance(keyword.value, ast.Name) and keyword.value.id not in known | {"None"}
            if keyword.arg is None or inner or (stays and keyword.arg == getattr(keyword.value, "id", "")):
                continue
            if unknown := _unknown(keyword.value, known):
                raise CannotError(_by_hand(unknown))
            keywords.append((keyword.arg, ast.unparse(keyword.value)))
        if keywords:
            yield Call(target, tuple(keywords), before)


def _target(function: ast.expr) -> str | None:
    name = ast.unparse(function)
    if name.startswith(f"{_OPTIMIZERS}."):
        return name
    short = name.rpartition(".")[2]
    if short in ("to", "fully_shard") or "." not in name or name.startswith("torch.nn.parallel."):
        return short if short in HOMES else None
    return None


def _compile_arguments(statement: ast.stmt) -> str | None:
    """The arguments of ``torch.compile(model, ...)`` behind the model, ``None`` for another statement."""
    value = getattr(statement, "value", None)
    if not isinstance(value, ast.Call) or ast.unparse(value.func) != "torch.compile":
        return None
    if [ast.unparse(argument) for argument in value.args] != ["model"]:
        return None
    return ", ".join(f"{keyword.arg}={ast.unparse(keyword.value)}" for keyword in value.keywords)


def _compiles_each(statement: ast.stmt) -> bool:
    """True for a loop that compiles each sharded unit by itself: ``for block in ...: block.compile()``."""
    if not isinstance(statement, ast.For):
        return False
    return [ast.unparse(one) for one in statement.body] == [f"{ast.unparse(statement.target)}.compile()"]


def _is_plain_call(statement: ast.stmt) -> bool:
    """True for a call as the script has it: ``fully_shard(model)``."""
    value = getattr(statement, "value", None)
    return isinstance(value, ast.Call) and _target(value.func) is not None


def _only_sets(statement: ast.stmt) -> bool:
    """True for a statement that calls nothing but setters, and assigns to attributes of torch."""
    if isinstance(statement, ast.Assign):
        return all(
            isinstance(target, ast.Attribute) and ast.unparse(target).startswith("torch.")
            for target in statement.targets
        )
    called = [ast.unparse(n.func).rpartition(".")[2] for n in ast.walk(statement) if isinstance(n, ast.Call)]
    plain = {"list", "zip", "range", "enumerate"}
    return any(map(_SETTERS.fullmatch, called)) and all(
        name in plain or _SETTERS.fullmatch(name) for name in called
    )
