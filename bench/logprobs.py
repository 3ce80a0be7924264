"""Time and memory of losses.token_logprobs against plain log_softmax, forward and backward.

    python bench/logprobs.py                      # GPU: T = 8192, H = 896, V = 151936 in bfloat16
    python bench/logprobs.py --T 2048 --V 32768   # CPU: T = 1024 in float32 unless told otherwise

The head of Qwen2.5-0.5B; hidden and weight both want a gradient. The two run by turns (A B A B ...), so that what else
the machine does meets both alike. "extra" is the peak of torch's allocations over what was there before and over what
any implementation must return (log-probabilities and two gradients), as a part of the float32 logits, T x V x 4 bytes.
Targets: extra at most 5%, time at most 1.3 times plain.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the CPU's memory profiler is chatty
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from losses import token_logprobs


def plain(hidden, weight, targets, temperature, entropy):
    logp = torch.log_softmax((hidden @ weight.T).float() / temperature, -1)
    logprobs = logp.gather(-1, targets[:, None]).squeeze(-1)
    return (logprobs, -(logp.exp() * logp).sum(-1)) if entropy else logprobs


def chunked(hidden, weight, targets, temperature, entropy):
    return token_logprobs(hidden, weight, targets, temperature, entropy=entropy)


def forward_backward(f, inputs, args):
    """Seconds of forward and of backward, and the results (which stay alive, as they would in training). On a CPU it
    is the process's own time that counts, over its threads: the machine may be shared."""
    cuda = inputs[0].is_cuda
    clock = time.perf_counter if cuda else time.process_time
    marks = []

    def mark():
        if cuda:
            torch.cuda.synchronize()
        marks.append(clock())

    mark()
    outputs = f(*inputs, args.temperature, args.entropy)
    outputs = outputs if args.entropy else (outputs,)
    mark()
    grads = torch.autograd.grad(outputs, inputs[:2], [torch.ones_like(o) for o in outputs])
    mark()
    return marks[1] - marks[0], marks[2] - marks[1], [o.detach() for o in outputs] + list(grads)


def peak_extra(f, inputs, args):
    """Peak bytes beyond the inputs and the results."""
    if inputs[0].is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results = forward_backward(f, inputs, args)[2]
        peak = torch.cuda.max_memory_allocated() - before
    else:  # torch counts no CPU memory; its profiler sees every allocation, so add them up in order
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            results = forward_backward(f, inputs, args)[2]
        events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        held = peak = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            held += event.nbytes()
            peak = max(peak, held)
    return peak - sum(r.numel() * r.element_size() for r in results)


def main():
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--T", type=int, default=8192 if cuda else 1024)
    parser.add_argument("--H", type=int, default=896)
    parser.add_argument("--V", type=int, default=151936)
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--entropy", action="store_true", help="the entropy as well, with its gradient")
    parser.add_argument("--repeats", type=int, default=20 if cuda else 5)
    args = parser.parse_args()

    torch.manual_seed(0)
    device, dtype = "cuda" if cuda else "cpu", getattr(torch, args.dtype)
    hidden = torch.randn(args.T, args.H, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(args.V, args.H, device=device) * 0.05).to(dtype).requires_grad_()
    inputs = hidden, weight, torch.randint(args.V, (args.T,), device=device)

    variants = {"plain": plain, "token_logprobs": chunked}
    extra = {name: peak_extra(f, inputs, args) for name, f in variants.items()}  # and a warm-up
    times = {name: [] for name in variants}
    for _ in range(args.repeats):
        for name, f in variants.items():
            times[name].append(forward_backward(f, inputs, args)[:2])

    where = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} thread(s)"
    print(f"T={args.T} H={args.H} V={args.V} {args.dtype}, temperature {args.temperature}, entropy {args.entropy}")
    print(f"float32 logits: {args.T * args.V * 4 / 2**20:.0f} MiB; medians of {args.repeats} by turns; {where}\n")
    columns = ("forward ms", "backward ms", "total ms", "fastest ms", "extra MiB", "/ logits")
    print(f"{'':16}" + "".join(f"{c:>13}" for c in columns))
    total = {name: [sum(t) for t in times[name]] for name in variants}
    for name in variants:
        forward, backward = (statistics.median(t) * 1e3 for t in zip(*times[name]))
        both, best = statistics.median(total[name]) * 1e3, min(total[name]) * 1e3
        cells = f"{forward:13.1f}{backward:13.1f}{both:13.1f}{best:13.1f}"
        print(f"{name:16}{cells}{extra[name] / 2**20:13.1f}{extra[name] / (args.T * args.V * 4):13.2%}")
    ratio = statistics.median(b / a for a, b in zip(*total.values()))
    fastest = min(total["token_logprobs"]) / min(total["plain"])
    print(f"\ntime: {ratio:.2f} times plain, median of the pairs (target 1.3); {fastest:.2f} of the fastest")
    print(f"extra memory: {extra['token_logprobs'] / (args.T * args.V * 4):.2%} of the logits (target 5%)")


if __name__ == "__main__":
    main()
