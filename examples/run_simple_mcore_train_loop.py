"""A training loop of your own on the library alone: build, train, save, reload, and see that nothing was lost.

    torchrun --nproc_per_node=2 examples/run_simple_mcore_train_loop.py

Two ranks split every matrix (tp 2). Change the layout with flags, for example `--tp 1` for two data-parallel ranks.
"""

import sys
from pathlib import Path

import torch

try:
    import petatron
except ImportError:  # started from a clone without installing
    sys.path.insert(0, str(Path(__file__).parent.parent))
    import petatron

FLAGS = "--tp 2 --mock-data --num-layers 2 --seq-length 64 --micro-batch-size 2 --global-batch-size 8 --train-iters 20 --lr 3e-3"


def train(
    run: petatron.RunConfig, model: petatron.Model, optimizer: petatron.MasterOptimizer, *, done: int, to: int
) -> None:
    """Steps `done` + 1 to `to`, on the samples that come after those already consumed."""
    loader = petatron.build_loader(run, model.mesh, consumed_samples=done * run.train.global_batch_size)
    for step, batches in zip(range(done + 1, to + 1), loader):
        loss = model.train_step(batches)  # forward and backward of every micro-batch; gradients are reduced
        result = optimizer.step(lr=run.optim.lr)
        if model.mesh.rank == 0 and (step == done + 1 or step % 5 == 0):
            print(f"step {step:3d}  loss {loss:.4f}  gradient norm {result.grad_norm:.3f}")


def weights(model: petatron.Model) -> torch.Tensor:
    return torch.cat([weight.double() for group in model.param_groups for weight in group.weights()])


def main() -> None:
    run = petatron.load("tiny-llama", [*FLAGS.split(), *sys.argv[1:]]).config
    mesh = petatron.launch(run)
    model = petatron.build_model(run, mesh)
    optimizer = petatron.build_optimizer(run, model)

    folder = run.checkpoint.save or "runs/simple-loop"  # all ranks must see the same folder
    train(run, model, optimizer, done=0, to=10)
    petatron.save_checkpoint(folder, step=10, model=model, optimizer=optimizer, facts={"step": 10})
    train(run, model, optimizer, done=10, to=20)

    again = petatron.build_model(run, mesh)
    its_optimizer = petatron.build_optimizer(run, again)
    facts = petatron.load_checkpoint(folder, model=again, optimizer=its_optimizer)
    assert facts is not None
    train(run, again, its_optimizer, done=facts["step"], to=20)

    same = torch.equal(weights(model), weights(again))
    print(f"rank {mesh.rank}: reloaded run is bitwise equal: {same}")
    if not same:
        sys.exit(1)


if __name__ == "__main__":
    main()
