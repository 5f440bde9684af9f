"""Frozen dataclasses for modules that an agent and `dtrain run` import; used and type-checked like `dataclasses`.

An agent starts on every host, and nearly half of the processor time until its Hello would be spent in `dataclasses`,
which imports `inspect` and compiles six methods for each class (0.8 ms). `dtrain run` of an empty script would take
0.60 s of processor time instead of 0.50 s. Here all classes share their methods. The functions of `dataclasses`
(fields, replace, asdict) work with these classes too, but without types. No base class may be a dataclass itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["dataclass", "field", "names_of", "replace"]

if TYPE_CHECKING:
    from dataclasses import dataclass, field, replace
else:

    def dataclass(*, frozen):
        """Return the decorator that makes a class a frozen dataclass of its annotated fields."""
        assert frozen
        return _make

    class field:  # the name in dataclasses
        """Field options; same meaning as in `dataclasses.field`."""

        def __init__(self, **options):
            if unknown := options.keys() - {"default", "default_factory", "compare", "repr"}:
                raise TypeError(f"a field has no {min(unknown)} here; see launcher/frozen.py")
            self.options = options

    def replace(instance, /, **changes):
        """Return a copy with other values for some fields."""
        return type(instance)(**{**instance.__dict__, **changes})

    class _StandardFields:
        """The attribute that functions of `dataclasses` look for in a class; made at the first access."""

        def __get__(self, instance, cls):
            import dataclasses

            given = {
                name: dataclasses.field(**value.options) if isinstance(value, field) else value
                for name, value in cls._given.items()
            }
            standard = [(name, "Any", *([given[name]] if name in given else [])) for name in cls.__match_args__]
            cls.__dataclass_fields__ = dataclasses.make_dataclass(cls.__name__, standard).__dataclass_fields__
            return cls.__dataclass_fields__

    def _make(cls):
        if hasattr(cls, "__post_init__"):
            raise TypeError(f"{cls.__name__}: __post_init__ is not called here")
        names = tuple(cls.__annotations__)
        known = frozenset(names)
        given = {name: cls.__dict__[name] for name in names if name in cls.__dict__}
        options = {name: value.options for name, value in given.items() if isinstance(value, field)}
        defaults = {name: value for name, value in given.items() if name not in options}
        defaults.update((name, each["default"]) for name, each in options.items() if "default" in each)
        factories = {name: each["default_factory"] for name, each in options.items() if "default_factory" in each}
        compared = [name for name in names if options.get(name, {}).get("compare", True)]
        shown = [name for name in names if options.get(name, {}).get("repr", True)]
        for name in options:  # as in dataclasses, only a default is an attribute of the class
            delattr(cls, name)
        for name in defaults.keys() & options.keys():
            setattr(cls, name, defaults[name])

        def __init__(self, *args, **kwargs):
            if args or kwargs.keys() != known:
                kwargs = complete(args, kwargs)
            self.__dict__.update(kwargs)

        def complete(args, values):
            """Return all values by name. Raises TypeError."""
            placed = dict(zip(names, args))  # noqa: B905  # too many args are an error below
            missing = known - placed.keys() - values.keys() - defaults.keys() - factories.keys()
            wrong = missing | (values.keys() - known) | (values.keys() & placed.keys())
            if wrong or len(args) > len(names):
                raise TypeError(f"{cls.__name__}: missing, unknown or given twice: {wrong or f'{len(args)} values'}")
            made = {name: make() for name, make in factories.items() if name not in placed and name not in values}
            return {**defaults, **made, **placed, **values}

        def __eq__(self, other):
            if other.__class__ is not self.__class__:
                return NotImplemented
            ours, theirs = self.__dict__, other.__dict__
            return all(ours[name] == theirs[name] for name in compared)

        def __hash__(self):
            values = self.__dict__
            return hash(tuple([values[name] for name in compared]))

        def __repr__(self):
            return f"{cls.__qualname__}({', '.join(f'{name}={self.__dict__[name]!r}' for name in shown)})"

        cls.__match_args__, cls._given, cls.__dataclass_fields__ = names, given, _StandardFields()
        cls.__init__, cls.__eq__, cls.__hash__, cls.__repr__ = __init__, __eq__, __hash__, __repr__
        cls.__setattr__ = cls.__delattr__ = _refuse
        cls.__replace__ = replace  # for copy.replace of Python 3.13
        return cls

    def _refuse(self, name, *_):
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot change {name} of a {type(self).__name__}")


def names_of(cls: type) -> tuple[str, ...] | None:
    """Return the names of a dataclass's fields, made here or by `dataclasses`; None for any other class."""
    fields = vars(cls).get("__dataclass_fields__")
    return tuple(fields) if isinstance(fields, dict) else fields and cls.__match_args__  # type: ignore[attr-defined]
