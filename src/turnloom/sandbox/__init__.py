"""Where an agent runs.

A sandbox is a place with a working directory and a home, in which commands run
and files are kept until it is stopped. `contract` says what every backend
promises, `conformance` proves it for any backend, `local` is the one that needs
nothing. How strongly a sandbox keeps its processes in is the backend's to say;
`local` does not.
"""

from turnloom.sandbox.contract import Backend, ExecResult, Needs, Sandbox, SandboxUnavailable
from turnloom.sandbox.local import LocalBackend, LocalSandbox
from turnloom.sandbox.registry import load_sandbox

__all__ = [
    "Backend",
    "ExecResult",
    "LocalBackend",
    "LocalSandbox",
    "Needs",
    "Sandbox",
    "SandboxUnavailable",
    "load_sandbox",
]
