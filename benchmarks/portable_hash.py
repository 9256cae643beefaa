"""Hash the results of all compiled kernels of portable bits, built for several processors.

    python benchmarks/portable_hash.py

Each line must have the same hash. aarch64 is built by aarch64-linux-gnu-gcc and emulated by
qemu-aarch64, both Debian's, where they are installed.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from lightning_d9m.ops.portability import compiler
from lightning_d9m.ops.portability.formulas import FUNCTIONS, KERNELS, write_sources

START = """
#include "kernels.c"
#include <stdio.h>
enum { ROWS = 12, TERMS = 333, ALL = ROWS * TERMS };
static uint64_t hash = 1, state = 88172645463325252ull;
static uint64_t draw_word(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
}
#define HELPERS(real, word) \\
    static void mix_##real(real *x, long n) { /* one NaN stands for all */ \\
        for (long i = 0; i < n; i++) x[i] = x[i] != x[i] ? 0 : x[i]; \\
        for (size_t i = 0; i < n * sizeof *x; i++) \\
            hash = (hash ^ ((unsigned char *)x)[i]) * 1099511628211ull; \\
    } \\
    static real fill_##real(int any) { \\
        word bits = (word)draw_word(); \\
        real x = (real)((double)(int64_t)draw_word() * 0x1p-61); \\
        if (any) memcpy(&x, &bits, sizeof x); \\
        return x; \\
    }
HELPERS(float, uint32_t)
HELPERS(double, uint64_t)
int main(void) {
"""
SUMS = """{
    static REAL a[70 * 300], b[300 * 90], o[70 * 90], r[300];
    long rows[70], terms[300], right[300], columns[90], out[70], zero[1] = {0};
    for (int i = 0; i < 300; i++) terms[i] = i, right[i] = i * 90;
    for (int i = 0; i < 90; i++) columns[i] = i;
    for (int i = 0; i < 70; i++) rows[i] = i * 300, out[i] = i * 90;
    for (int i = 0; i < 70 * 300; i++) a[i] = fill_REAL(0);
    for (int i = 0; i < 300 * 90; i++) b[i] = fill_REAL(0);
    struct product_REAL p = {70, 90, 300, a, b, o, rows, terms, zero, right, columns, zero,
                             out, columns, zero};
    d9m_share(product_REAL, &p, 90, 1, 0);
    mix_REAL(o, 70 * 90);
    struct row_sums_REAL s = {90, 1, 0, 90, 1, b, r};
    d9m_share(row_sums_REAL, &s, 300, 1, 0);
    mix_REAL(r, 300);
    struct column_sums_REAL c = {300, 90, 0, 90, b, r};
    d9m_share(column_sums_REAL, &c, 2, 1, 0);
    mix_REAL(r, 90);
    static double sums[4 * 90];
    for (int i = 0; i < 4 * 90; i++) sums[i] = -0.0;
    struct place_sums_REAL places = {3, 10, 1, 1, 1, 300, 1, 90, 0, 0, 1, 0, terms, b, 0, r, sums};
    for (int i = 0; i < 300; i++) terms[i] = i * i % 90;
    d9m_share(place_sums_REAL, &places, 90, 1, 0);
    mix_REAL(r, 90);
    struct draw_REAL d = {12345, 256, r};
    d9m_share(draw_REAL, &d, 256 * sizeof(REAL) / 256, 1, 0);
    mix_REAL(r, 256);
}
"""
NUMBERS = ["0.9", "0.3", "0.1", "0.9", "0.7", "1", "0", "0.5", "0.01"]


def write_call(name: str, real: str) -> str:
    """Return C that computes a kernel of formulas on random numbers, and hashes its results."""
    kernel, members, count = KERNELS[name], list[str](), 0
    for place in (*kernel.inputs.values(), *("at" for _ in kernel.fresh)):
        is_list = isinstance(place, int)
        members.append("{" + ", ".join(NUMBERS[:place]) + "}" if is_list else f"b[{count}]")
        count += not is_list
    size, items = ("ROWS", "ROWS") if kernel.in_rows else ("1", "ALL")
    anything = "i % 3 == 1" if name in FUNCTIONS else "0"
    return (
        f"{{ static {real} b[{count}][ALL]; for (int i = 0; i < ALL * {count}; i++) "
        f"b[0][i] = fill_{real}({anything}); "
        f"struct {name}_{real} g = {{TERMS, {size}, {', '.join(members)}}}; "
        f"d9m_share({name}_{real}, &g, {items}, 1, 0); mix_{real}(b[0], ALL * {count}); }}\n"
    )


def main() -> None:
    """Build, run and print."""
    gcc, arm = "gcc", "aarch64-linux-gnu-gcc -static"
    builds = {name: f"{gcc} {flags}" for name, flags in compiler.list_widths().items()}
    if shutil.which("qemu-aarch64") and shutil.which(arm.partition(" ")[0]):
        builds |= {"aarch64 NEON": arm, "aarch64 SVE": f"{arm} -march=armv8.2-a+sve"}
    flags = compiler._FLAGS.replace("-shared", "-w")  # noqa: SLF001 - those of the package
    parts = [START]
    for real in ("float", "double"):
        parts += [write_call(name, real) for name in KERNELS]
        parts.append(SUMS.replace("REAL", real))
    parts.append('printf("%016llx\\n", (unsigned long long)hash); }\n')
    hashes = set()
    with tempfile.TemporaryDirectory() as folder:
        for name, text in {**write_sources(), "main.c": "".join(parts)}.items():
            Path(folder, name).write_text(text)
        for name, command in builds.items():
            made = [*command.split(), *flags.split(), f"-I{folder}", f"-I{compiler.FOLDER}"]
            subprocess.run([*made, f"{folder}/main.c", "-o", f"{folder}/main", "-lm"], check=True)
            run = ["qemu-aarch64", "-cpu", "max"] if "aarch64" in name else []
            done = subprocess.run([*run, f"{folder}/main"], check=True, stdout=subprocess.PIPE)
            print(name, done.stdout.decode().strip(), flush=True)
            hashes.add(done.stdout)
    sys.exit(len(hashes) > 1)


if __name__ == "__main__":
    main()
