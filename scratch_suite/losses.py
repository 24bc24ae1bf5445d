import warnings

warnings.filterwarnings("ignore")
import gc, sys, time, torch
from petatron.bench.peers.bench_model import bench_spec, make_batches
from petatron.bench import peers

small = sys.argv[1:] or "--preset mixtral-slice --seq-length 4096 --micro-batch-size 1".split()
began = time.time()


def losses(name, *flags, n=12):
    spec = bench_spec([*small, *flags])
    c = peers.build(name, spec)
    b = make_batches(spec)
    found = []
    t = []
    for i in range(n):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        s = time.perf_counter()
        found.append(float(c.step(b[i % 4])))
        t.append(time.perf_counter() - s)
    peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0
    del c, b
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    print(
        f"{name:9}{' '.join(flags):48}",
        *[f"{v:8.4f}" for v in found],
        f"{sorted(t)[n // 2] * 1e3:6.1f} ms {peak:.1f} GB, {time.time() - began:.0f} s",
        flush=True,
    )
    return found


def apart(text, x, y):
    print(
        f"  {text}: {max(abs(p - q) / y[0] for p, q in zip(x[:10], y[:10])):.3%} of the first over ten steps, first apart {abs(x[0] - y[0]) / y[0]:.4%}",
        flush=True,
    )


def attempt(f):
    try:
        f()
    except Exception as e:
        print("FAILED", type(e).__name__, str(e)[:600], flush=True)


def at(lr, aux=False, f32=False):
    a = losses("petatron", "--lr", lr)
    h = losses("hf", "--lr", lr)
    apart(f"lr {lr} ours/hf", a, h)
    if aux:
        apart("hf without balancing loss", losses("hf", "--lr", lr, "--moe-aux-loss-coeff", "0"), h)
    if f32:
        a32 = losses("petatron", "--lr", lr, "--no-bf16")
        h32 = losses("hf", "--lr", lr, "--no-bf16")
        apart(f"lr {lr} float32 ours/hf", a32, h32)
        apart("ours bf16/f32", a, a32)
        apart("hf bf16/f32", h, h32)


attempt(lambda: at("1e-4", aux=True))
attempt(lambda: at("2.5e-5"))
attempt(lambda: at("1e-5"))
attempt(lambda: at("1e-4", f32=True))
