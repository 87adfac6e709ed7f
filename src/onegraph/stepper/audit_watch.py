"""Watches torch.compile while a mode runs: graph breaks, reads of values such as `.item()`, and recompiles, by line."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from logging import DEBUG, Handler, LogRecord
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from torch._dynamo import guards, output_graph, symbolic_convert
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.overrides import TorchFunctionMode

Kind = Literal["graph break", "value read", "recompile", "error"]
_PACKAGE = Path(__file__).parents[1]
_INSTALLED = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sysconfig.get_path("stdlib")})
# Calls that wait for the device and bring a value to Python, or that make shapes of values.
_READS = {"item", "tolist", "_local_scalar_dense", "nonzero", "masked_select", "unique"}
_READS |= {"__bool__", "__float__", "__int__", "__index__"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that a compiled or captured step must not do.

    Attributes:
        kind: What it is.
        reason: In torch's words, the first lines.
        where: file:line of the user's code, relative to the working directory or the package; "" if unknown.
        code: That line.
        when: "warm-up" or "update 3".
    """

    kind: Kind
    reason: str
    where: str = ""
    code: str = ""
    when: str = "warm-up"

    def text(self) -> str:
        """One line."""
        place = f" at {self.where}" if self.where else ""
        code = f" ({self.code})" if self.code else ""
        return f"{self.kind} in {self.when}{place}{code}: {self.reason}"


class Watch:
    """Collects findings while `running` lasts.

    Attributes:
        findings: What was found, in order; each line of code once a kind and a phase.
        when: The phase that findings belong to.
    """

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.when = "warm-up"

    def add(self, kind: Kind, reason: str, where: str = "", code: str = "") -> None:
        """Notes a finding, unless the same is known."""
        finding = Finding(kind=kind, reason=reason, where=where, code=code, when=self.when)
        if finding not in self.findings:
            self.findings.append(finding)

    def add_error(self, error: Exception) -> None:
        """Notes what ended a mode."""
        frames = getattr(error, "real_stack", None) or traceback.extract_tb(error.__traceback__)
        if isinstance(error, FailOnRecompileLimitHit):
            self.add("recompile", first_line(error), *_pick(frames))
        elif isinstance(error, TorchDynamoException):
            self.add("graph break", first_line(error), *_pick(frames))
        else:
            self.add("error", f"{type(error).__name__}: {first_line(error)}", *_pick(frames))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Listens to torch.compile in this process."""
        with ExitStack() as stack:
            stack.enter_context(_listening(guards.recompiles_log, "recompiles", self._on_recompile))
            stack.enter_context(_listening(symbolic_convert.graph_break_log, "graph_breaks", self._on_break))
            stack.enter_context(self._reading_graphs())
            yield

    @contextmanager
    def reads(self) -> Iterator[None]:
        """Notes every read of a value by Python code that runs eagerly: where a real capture would fail."""
        note = self._note_read

        class Reads(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                name = getattr(func, "__name__", "")
                if name in _READS:
                    note(name, traceback.extract_stack())
                return func(*args, **(kwargs or {}))

        with Reads():
            yield

    @contextmanager
    def _reading_graphs(self) -> Iterator[None]:
        """Looks through every graph that is traced: `fullgraph=True` does not refuse `.item()`."""
        original = output_graph.OutputGraph.call_user_compiler

        def look(graph_owner: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            for node in module.graph.nodes:
                name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
                name = name.split(".")[0]
                if node.op in ("call_method", "call_function") and name in _READS:
                    self._note_read(name, _frames_of(node.stack_trace or ""))
            return original(graph_owner, module, *args, **kwargs)

        with mock.patch.object(output_graph.OutputGraph, "call_user_compiler", look):
            yield

    def _note_read(self, name: str, frames: Sequence[traceback.FrameSummary]) -> None:
        self.add("value read", f"{name}() waits for the device to bring a value to Python", *_pick(frames))

    def _on_recompile(self, text: str) -> None:
        header, _, rest = text.partition("\n")
        lines = [re.sub(r"^\s*-?\s*(\d+/\d+: )?", "", line) for line in rest.splitlines()]
        reasons = [line for line in lines if line and not line.startswith("triggered by")]
        function = re.match(r"Recompiling function (\S+) in (.*):(\d+)$", header.strip())
        where, code = "", ""
        if function:
            where, code = relative_place(function[2], int(function[3])), f"in {function[1]}"
        self.add("recompile", "; ".join(dict.fromkeys(reasons)) or "no reason given", where, code)

    def _on_break(self, text: str) -> None:
        place = re.search(r"in user code at (.*):(\d+)", text)
        reason = re.search(r"Reason: *(.*)", text)
        where = relative_place(place[1], int(place[2])) if place else ""
        self.add("graph break", reason[1] if reason else first_line(text), where)


class _Listener(Handler):
    def __init__(self, hear: Any) -> None:
        super().__init__(DEBUG)
        self.hear = hear

    def emit(self, record: LogRecord) -> None:
        """Passes the text on."""
        self.hear(record.getMessage())


@contextmanager
def _listening(log: Any, artifact: str, hear: Any) -> Iterator[None]:
    """Hears an artifact log of torch, and keeps it from the terminal unless it was asked for with TORCH_LOGS."""
    names = torch._logging._internal.log_state.artifact_names
    was_on, level, propagate = artifact in names, log.level, log.propagate
    listener = _Listener(hear)
    names.add(artifact)
    log.addHandler(listener)
    log.setLevel(DEBUG)
    log.propagate = propagate and was_on
    try:
        yield
    finally:
        log.removeHandler(listener)
        log.setLevel(level)
        log.propagate = propagate
        if not was_on:
            names.discard(artifact)


def first_line(error: object) -> str:
    """The first line of a text that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def relative_place(file: str, line: int | None) -> str:
    """`file:line` without the machine's own folders: relative to the working directory or the package."""
    path = Path(file)
    for root in (Path.cwd(), _PACKAGE.parent):
        if path.is_relative_to(root) and "site-packages" not in path.relative_to(root).parts:
            return f"{path.relative_to(root).as_posix()}:{line}"
    return f"{path.name}:{line}"


def _is_users(file: str) -> bool:
    """Code of a learner: neither installed packages nor the machinery of the stepper."""
    path = Path(file)
    if path.is_relative_to(_PACKAGE):
        return path.parent != _PACKAGE / "stepper"
    return not file.startswith((*_INSTALLED, "<"))


def _pick(frames: Sequence[traceback.FrameSummary]) -> tuple[str, str]:
    """Place and line of the innermost frame in a learner's code, or of the innermost one."""
    chosen = next((f for f in reversed(frames) if _is_users(f.filename)), frames[-1] if frames else None)
    if chosen is None:
        return "", ""
    return relative_place(chosen.filename, chosen.lineno), (chosen.line or "").strip()


def _frames_of(stack_trace: str) -> list[traceback.FrameSummary]:
    """From the text that traced nodes carry."""
    frames = re.findall(r'File "(.*)", line (\d+), in (.*)\n\s*(.*)', stack_trace)
    return [traceback.FrameSummary(file, int(line), name, line=code) for file, line, name, code in frames]
