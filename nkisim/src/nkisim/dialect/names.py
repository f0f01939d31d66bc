"""Rules of the dialect that depend on the meaning of a name: tensors, registers, modules."""

from __future__ import annotations

import ast
import builtins

from nkisim.dialect.rules import WARNING, Rule, Scope, Test, words
from nkisim.dialect.source import Definition, is_jit, resolve_chain
from nkisim.versions import VERSIONS, names, signatures

BUILTINS = words(
    "len min max abs str int float bool tuple list dict print isinstance type slice divmod range breakpoint super"
)
MATH = words("ceil floor gcd log2 log10 pow sqrt pi e inf nan")
LIST_METHODS = words("append clear copy count extend index pop remove reverse")
DICT_METHODS = words("clear copy get items keys pop setdefault values")
BASES = frozenset({"NKIObject", "Enum", "IntEnum", "NamedTuple", "object"})
DECORATORS = frozenset({"staticmethod", "dataclass", "dataclasses.dataclass"})
# keywords that take a member of an enum of nki.isa
ENUM_KEYWORDS = words("engine dge_mode oob_mode reduce_cmd dma_engine perf_mode")
# of an NkiScalar
SCALAR_OPERATORS = (ast.Add, ast.Sub, ast.Mult)
REMOVED = words("arange mgrid par_dim tensor_copy_dynamic_src tensor_copy_dynamic_dst")
REMOVED_KEYWORDS = frozenset({"mask", "dst_rmw_op", "use_gpsimd_dma"})


def is_tensor(node: ast.AST, scope: Scope) -> bool:
    """A tensor, an index into one, or a view method of one."""
    if isinstance(node, ast.Subscript):
        return is_tensor(node.value, scope)
    return isinstance(node, ast.Name) and node.id in scope.tensors


def is_register(node: ast.AST, scope: Scope) -> bool:
    """A name that holds a register."""
    return isinstance(node, ast.Name) and node.id in scope.registers


def matmul_operator(node: ast.BinOp | ast.AugAssign, _scope: Scope) -> bool:
    """`a @ b`."""
    return isinstance(node.op, ast.MatMult)


def tensor_operator(node: ast.AST, scope: Scope) -> bool:
    """`t + 1`, `-t`, `t += 1`."""
    if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.MatMult):
        return is_tensor(node.left, scope) or is_tensor(node.right, scope)
    if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not):
        return is_tensor(node.operand, scope)
    if isinstance(node, ast.AugAssign):
        return is_tensor(node.target, scope) or is_tensor(node.value, scope)
    return False


def _device_call(node: ast.AST, scope: Scope) -> bool:
    return isinstance(node, ast.Call) and scope.dotted(node.func).startswith("nki.isa.")


def _tensor_store(node: ast.Assign, scope: Scope) -> bool:
    return any(isinstance(t, ast.Subscript) and is_tensor(t, scope) for t in node.targets)


def store_call(node: ast.Assign, scope: Scope) -> bool:
    """`x[...] = nisa.f(...)`."""
    return _tensor_store(node, scope) and _device_call(node.value, scope)


def store_value(node: ast.Assign, scope: Scope) -> bool:
    """`x[...] = value`."""
    return _tensor_store(node, scope) and not _device_call(node.value, scope)


def unlisted_builtin(node: ast.Call, scope: Scope) -> bool:
    """A call of a Python builtin that kernels do not have."""
    if not isinstance(node.func, ast.Name):
        return False
    name = node.func.id
    known = name in scope.bound or name in scope.module.imports or name in scope.module.definitions
    return not known and hasattr(builtins, name) and name not in BUILTINS


def unlisted_math(node: ast.Attribute, scope: Scope) -> bool:
    """A member of math that kernels do not have."""
    name = scope.dotted(node)
    return name.startswith("math.") and name.count(".") == 1 and name[5:] not in MATH


def unlisted_method(node: ast.Call, scope: Scope) -> bool:
    """A list or dict method that kernels do not have."""
    if not (isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)):
        return False
    owner, method = node.func.value, node.func.attr
    if owner.id in scope.lists:
        return method not in LIST_METHODS
    return owner.id in scope.dicts and method not in DICT_METHODS


def other_decorator(node: Definition, scope: Scope) -> bool:
    """A decorator other than staticmethod, dataclass and nki.jit."""
    for decorator in node.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = scope.module.dotted(target) or ""
        if not (is_jit(scope.module, decorator) or name in DECORATORS):
            return True
    return False


def jit_option(name: str) -> Test:
    """The test for `@nki.jit(name=...)`."""

    def test(node: ast.FunctionDef, scope: Scope) -> bool:
        options = [d for d in node.decorator_list if isinstance(d, ast.Call) and is_jit(scope.module, d)]
        return any(k.arg == name for d in options for k in d.keywords)

    return test


def foreign_base(node: ast.ClassDef, scope: Scope) -> bool:
    """A class that does not inherit from NKIObject, Enum or NamedTuple."""
    if scope.in_function:
        return False
    names = [(scope.module.dotted(base) or "").split(".")[-1] for base in node.bases]
    return not names or bool(node.keywords) or any(name not in BASES for name in names)


def list_argument(node: ast.arguments, scope: Scope) -> bool:
    """A kernel parameter that is annotated or defaulted as a list."""
    names = {scope.module.dotted(_generic(a.annotation)) for a in node.args if a.annotation}
    lists = any(isinstance(d, ast.List) for d in node.defaults) or names & {"list", "List", "typing.List"}
    return scope.is_kernel and bool(lists)


def _generic(node: ast.AST) -> ast.AST:
    return node.value if isinstance(node, ast.Subscript) else node


def raw_enum(node: ast.Call, scope: Scope) -> bool:
    """`engine=2`."""
    values = [k.value for k in node.keywords if k.arg in ENUM_KEYWORDS]
    return _device_call(node, scope) and any(isinstance(v, ast.Constant) and type(v.value) is int for v in values)


def string_buffer(node: ast.Call, scope: Scope) -> bool:
    """`buffer="sbuf"`."""
    values = [k.value for k in node.keywords if k.arg == "buffer" and scope.dotted(node.func).startswith("nki.")]
    return any(isinstance(v, ast.Constant) and isinstance(v.value, str) for v in values)


def removed_keyword(node: ast.Call, scope: Scope) -> bool:
    """`nisa.f(..., mask=...)`."""
    return scope.dotted(node.func).startswith("nki.") and any(k.arg in REMOVED_KEYWORDS for k in node.keywords)


def removed_name(node: ast.Attribute | ast.Name, scope: Scope) -> bool:
    """`nl.arange`, `nl.par_dim` and others."""
    name = scope.dotted(node)
    return name.startswith("nki.") and name.split(".")[-1] in REMOVED


def newer_name(node: ast.Attribute | ast.Name, scope: Scope) -> bool:
    """`nl.tiles`, `nisa.scalar_load` and others."""
    name = scope.dotted(node)
    return name.startswith("nki.") and name in names("0.7") - names("0.6")


def scalar_operator(node: ast.BinOp | ast.AugAssign, scope: Scope) -> bool:
    """`scalar // 2`."""
    if isinstance(node.op, SCALAR_OPERATORS):
        return False
    sides = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
    return any(isinstance(side, ast.Name) and side.id in scope.scalars for side in sides)


def wrong_call(node: ast.Call, scope: Scope) -> bool | str:
    """A call of the API with a missing, unknown or surplus argument, by the manual's signatures."""
    name = scope.dotted(node.func)
    signature = signatures(VERSIONS[scope.traced]).get(name)
    given = [k.arg for k in node.keywords]
    if signature is None or None in given or any(isinstance(a, ast.Starred) for a in node.args):
        return False
    known = [parameter[0] for parameter in signature]
    unknown = [arg for arg in given if arg not in known and arg not in REMOVED_KEYWORDS]
    missing = [p[0] for p in signature[len(node.args) :] if len(p) == 1 and p[0] not in given]
    fault = f"has no argument {unknown[0]!r}" if unknown else f"needs {missing[0]!r}" if missing else ""
    if len(node.args) > len(known):
        fault = f"has {len(node.args)} arguments without a name"
    if any(parameter.startswith("*") for parameter in known) or not fault:
        return False
    return f"{name.removeprefix('nki.')} {fault}; its arguments are {', '.join(known)}"


def old_namespace(node: ast.Name, scope: Scope) -> bool:
    """Anything from neuronxcc.nki."""
    name = scope.dotted(node)
    return name == "neuronxcc" or name.startswith(("neuronxcc.nki", "neuronxcc.starfish"))


def kernel_in_kernel(node: ast.Call, scope: Scope) -> bool:
    """A call of a function that is itself decorated with nki.jit."""
    target = resolve_chain(scope.module, node.func)
    return target is not None and any(is_jit(target[0], d) for d in target[1].decorator_list)


def private_return(node: ast.Return, scope: Scope) -> bool:
    """A kernel returns a tensor that is not in shared_hbm."""
    if not scope.is_kernel or node.value is None:
        return False
    parts = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
    return any(isinstance(p, ast.Name) and p.id in scope.private_outputs for p in parts)


NAME_RULES: tuple[Rule, ...] = (
    Rule("matmul-operator", (ast.BinOp, ast.AugAssign), matmul_operator,
         "`@` is not compiled; call nisa.nc_matmul", "PF"),
    Rule("tensor-operator", (ast.BinOp, ast.UnaryOp, ast.AugAssign), tensor_operator,
         "Python operators on tensors are not supported; call nisa.tensor_tensor, "
         "nisa.tensor_scalar or an nl function", "MG"),
    Rule("store-call", (ast.Assign,), store_call,
         "assigning an instruction's result to a tensor is deprecated; pass dst=", "PF", WARNING),
    Rule("store-value", (ast.Assign,), store_value,
         "one page of the migration guide refuses a value assigned to a tensor, another writes it; pass dst=",
         "MG 0.2", WARNING, WARNING),
    Rule("builtin", (ast.Call,), unlisted_builtin,
         "this builtin does not exist in a kernel; use a range loop, len, min, max, abs, divmod",
         "PF"),
    Rule("math", (ast.Attribute,), unlisted_math,
         "this member of math does not exist in a kernel; there are ceil, floor, gcd, log2, log10, "
         "pow, sqrt, pi, e, inf, nan", "PF"),
    Rule("method", (ast.Call,), unlisted_method,
         "this method does not exist in a kernel; lists have append, clear, copy, count, extend, "
         "index, pop, remove, reverse; dicts clear, copy, get, items, keys, pop, setdefault, "
         "values", "PF"),
    Rule("decorator", (ast.FunctionDef, ast.ClassDef), other_decorator,
         "the only decorators are staticmethod, dataclass and nki.jit; call the wrapper explicitly",
         "PF"),
    Rule("jit-target", (ast.FunctionDef,), jit_option("platform_target"),
         "jit(platform_target=...) raises; set NEURON_PLATFORM_TARGET_OVERRIDE", "MG 0.3"),
    Rule("jit-mode", (ast.FunctionDef,), jit_option("mode"),
         "jit(mode=...) is ignored; remove it, the arguments decide", "MG 0.3", WARNING, WARNING),
    Rule("class-base", (ast.ClassDef,), foreign_base,
         "a class used in a kernel inherits from nl.NKIObject, Enum or NamedTuple only", "LG"),
    Rule("list-argument", (ast.arguments,), list_argument,
         "a kernel argument cannot be a list; pass a tuple", "MG 0.3"),
    Rule("raw-enum", (ast.Call,), raw_enum,
         "integers are not accepted for enums; name the member, such as nisa.engine.vector",
         "MG 0.3"),
    Rule("string-buffer", (ast.Call,), string_buffer,
         "a buffer is an object; write nl.sbuf, nl.psum, nl.shared_hbm or nl.private_hbm",
         "MG 0.3"),
    Rule("removed-keyword", (ast.Call,), removed_keyword,
         "mask, dst_rmw_op and use_gpsimd_dma are gone; slice the operands, use nisa.dma_compute, "
         "or dma_engine=", "MG 0.3"),
    Rule("removed-name", (ast.Attribute, ast.Name), removed_name,
         "arange, mgrid, par_dim and tensor_copy_dynamic_* are gone; index with slices or nl.ds, "
         "put the partition dimension first, use tensor_copy with .ap(scalar_offset=...)",
         "MG 0.2, 0.4"),
    Rule("newer-name", (ast.Attribute, ast.Name), newer_name,
         "this name came with NKI 0.7; write it with what 0.6 has, or lint with --nki 0.7", "MG 0.7", traced=None),
    Rule("scalar-operator", (ast.BinOp, ast.AugAssign), scalar_operator,
         "a scalar of the device has +, - and * only; compute the rest in SBUF and load it", "NS", severity=None),
    Rule("call", (ast.Call,), wrong_call, "pass the arguments of its signature", "SG"),
    Rule("old-namespace", (ast.Name,), old_namespace,
         "neuronxcc.nki is a compile error; import nki, nki.language and nki.isa", "MG 0.4"),
    Rule("kernel-in-kernel", (ast.Call,), kernel_in_kernel,
         "a jitted kernel cannot be called from a kernel; leave the callee undecorated and jit it "
         "where the host calls it", "MG 0.2"),
    Rule("private-output", (ast.Return,), private_return,
         "a kernel returns tensors in nl.shared_hbm only; allocate the output there", "MG 0.3"),
)  # fmt: skip
