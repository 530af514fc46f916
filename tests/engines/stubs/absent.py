"""Stand-ins for packages that SGLang imports on a CPU and does not use there. Only these stubs import this.

Every module below a stub can be imported and has every attribute: a class that
can be subclassed, compared and put in annotations. Called, it raises.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _AbsentType(type):
    def __getattr__(cls, name: str) -> Any:
        return absent(f"{cls.__module__}.{cls.__qualname__}", name)

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{cls.__module__}.{cls.__qualname__} is a stand-in and cannot run")


def absent(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"{module} is a stand-in and has no {name}")
    return _AbsentType(name, (), {"__module__": module})


class _AbsentModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return absent(self.__name__, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes up any module below one package."""

    def __init__(self, package: str) -> None:
        self._below = package + "."

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith(self._below) else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in(package: str) -> None:
    """Called by a stub of `package` while it is imported."""
    sys.meta_path.insert(0, _Finder(package))
    sys.modules[package].__class__ = _AbsentModule
