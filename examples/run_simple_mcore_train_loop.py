"""Your own training loop with the library alone: build, train, save, reload, and check that nothing was lost.

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
    run: petatron.Run,
    model: petatron.Model,
    optimizer: petatron.MasterOptimizer,
    state: petatron.TrainState,
    *,
    to: int,
) -> None:
    """Trains to iteration `to`, on the samples that come after those already consumed."""
    first = state.progress.iteration + 1
    for batches in petatron.build_loader(run, model.mesh, state=state):
        settings = state.update_settings()  # learning rate, weight decay and loss scale at this point of the schedules
        loss = model.train_step(batches, loss_scale=settings["loss_scale"])  # forward, backward, gradient reduction
        result = optimizer.step(**settings)
        state.advance(batches, result)  # iteration, samples, loss scale
        step = state.progress.iteration
        if model.mesh.rank == 0 and (step == first or step % 5 == 0):
            print(f"step {step:3d}  loss {loss:.4f}  gradient norm {result.grad_norm:.3f}")
        if step == to:
            return


def weights(model: petatron.Model) -> torch.Tensor:
    return torch.cat([weight.double() for group in model.param_groups for weight in group.weights()])


def main() -> None:
    flags = [*FLAGS.split(), *sys.argv[1:]]
    run = petatron.load("tiny-llama", flags)
    mesh = petatron.launch(run)
    model = petatron.build_model(run, mesh)
    optimizer = petatron.build_optimizer(run, model)
    state = petatron.restore(run, model, optimizer)  # nothing to restore: iteration 0

    folder = run.config.checkpoint.save or "runs/simple-loop"  # all ranks must see the same folder
    train(run, model, optimizer, state, to=10)
    petatron.save_checkpoint(folder, step=10, model=model, optimizer=optimizer, state=state)
    train(run, model, optimizer, state, to=20)

    resumed = petatron.load("tiny-llama", [*flags, "--load", folder, "--ckpt-step", "10"])
    again = petatron.build_model(resumed, mesh)  # the weights of step 10
    its_optimizer = petatron.build_optimizer(resumed, again)
    its_state = petatron.restore(resumed, again, its_optimizer)  # everything else of step 10
    train(resumed, again, its_optimizer, its_state, to=20)

    same = torch.equal(weights(model), weights(again))
    print(f"rank {mesh.rank}: reloaded run is bitwise equal: {same}")
    if not same:
        sys.exit(1)


if __name__ == "__main__":
    main()
