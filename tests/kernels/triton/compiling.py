"""Compile variants for a card that is not there, and read what they need from the machine code.

Run as a program it compiles a share of all variants (`python -m tests.kernels.triton.compiling SHARE OF FOLDER`),
since a process in which the interpreter is on cannot compile. A result is kept under a digest of everything it follows
from.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.triton.variants import Variant, every_variant

KERNELS = Path(__file__).resolve().parents[3] / "kernels" / "triton"
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes. `loads` are the widths of its loads from global memory, in bytes."""

    registers: int
    stack: int  # bytes of a thread: more than none means spilled registers
    shared: int  # bytes of a block
    loads: list[int]
    wide_products: bool  # wgmma


def digest(variant: Variant, target: int) -> str:
    """Of the sources of all kernels too: they use one another."""
    files = [path.read_text() for path in sorted(KERNELS.glob("*.py"))]
    sources = [text for text in files if "import triton.language" in text]
    facts = (triton.__version__, target, variant.name, variant.types, variant.constants, variant.options,
             sorted(variant.aligned), sources)  # fmt: skip
    return blake2b(repr(facts).encode(), digest_size=12).hexdigest()


def compile_variant(variant: Variant, target: int) -> Resources:
    names = variant.kernel.arg_names
    signature = {name: variant.types.get(name, "constexpr") for name in names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if variant.types.get(name, "").startswith("*") or name in variant.aligned
    }
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=variant.constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=dict(variant.options))
    return measure(compiled.asm["cubin"], compiled.asm["ptx"], compiled.metadata.shared)


def measure(cubin: bytes, ptx: str, shared: int) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "cuobjdump", "-res-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True)
    figures = dict(re.findall(r"(REG|STACK):(\d+)", usage.stdout + usage.stderr))
    return Resources(int(figures["REG"]), int(figures["STACK"]), shared, load_widths(ptx), "wgmma.mma_async" in ptx)


def load_widths(ptx: str) -> list[int]:
    """Bytes a thread takes at once, of each load from global memory and of each asynchronous copy to shared memory."""
    copies = [int(size, 16) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^,]*, \[[^,]*, (0x\w+)", ptx)]
    loads = re.findall(r"ld\.global[.\w:]*?(?:\.v(\d))?\.b(\d+)", ptx)
    return sorted({*copies, *(int(count or 1) * int(bits) // 8 for count, bits in loads)})


def main(share: int, of: int, folder: Path) -> None:
    """Compile every `of`-th variant and target whose result is not there yet."""
    work = [(variant, target) for variant in every_variant() for target in variant.targets]
    for variant, target in work[share::of]:
        kept = folder / f"{digest(variant, target)}.json"
        if kept.exists():
            continue
        try:
            result: dict[str, object] = asdict(compile_variant(variant, target))
        except Exception as error:  # whatever the compiler says is the result of this variant
            result = {"error": f"{type(error).__name__}: {error}"}
        unfinished = kept.with_suffix(f".{share}")
        unfinished.write_text(json.dumps(result))
        unfinished.rename(kept)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
