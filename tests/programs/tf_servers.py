"""Trains with ParameterServerStrategy, or in one process where there is no TF_CONFIG; see test_tensorflow.py.

The coordinator is the chief. Workers and parameter servers run a tf.distribute.Server, which never ends by itself.
"""

import argparse
import os
import pathlib
import signal
import time

import numpy as np
import tensorflow as tf

STEPS, ROWS = 6, 12
TRAINS = pathlib.Path("trains")  # is there after the first steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--die", choices=["ps", "worker"], help="the second of these is killed while it is in use")
    args = parser.parse_args()
    if "TF_CONFIG" not in os.environ:
        losses, weights = train(tf.distribute.get_strategy(), None)
    else:
        os.environ["GRPC_FAIL_FAST"] = "use_caller"
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        if resolver.task_type in ("worker", "ps"):
            serve(resolver, dies=(resolver.task_type, resolver.task_id) == (args.die, 1))
        strategy = tf.distribute.ParameterServerStrategy(
            resolver, variable_partitioner=tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
        )
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        losses, weights = train(strategy, coordinator, steps=100_000 if args.die else STEPS)
    for number, loss in enumerate(losses):
        print(f"step {number} loss {loss:.10f}", flush=True)
    print("weights", " ".join(f"{weight:.10f}" for weight in weights), flush=True)


def serve(resolver: tf.distribute.cluster_resolver.TFConfigClusterResolver, *, dies: bool) -> None:
    server = tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
    )
    print(f"{resolver.task_type} {resolver.task_id} serves at {server.target}", flush=True)
    if dies:
        while not TRAINS.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    server.join()


def train(
    strategy: tf.distribute.Strategy,
    coordinator: tf.distribute.coordinator.ClusterCoordinator | None,
    steps: int = STEPS,
) -> tuple[list[float], list[float]]:
    """Return the losses of all steps, and the weights after them."""
    x = np.random.default_rng(1).normal(size=(ROWS, 4))
    y = np.sin(x.sum(axis=1, keepdims=True))
    with strategy.scope():
        weight = tf.Variable(np.full((4, 1), 0.1), name="weight")
        bias = tf.Variable(np.zeros((1,)), name="bias")

    @tf.function
    def step(rows):
        with tf.GradientTape() as tape:
            matrix = tf.convert_to_tensor(weight)
            tape.watch(matrix)
            share = tf.gather(x, rows) @ matrix + bias
            loss = tf.reduce_sum((share - tf.gather(y, rows)) ** 2) / ROWS
        return loss, *tape.gradient(loss, [matrix, bias])

    losses = []
    for number in range(steps):
        halves = [tf.range(0, ROWS // 2), tf.range(ROWS // 2, ROWS)]
        if coordinator is None:
            parts = [step(rows) for rows in halves]
        else:
            scheduled = [coordinator.schedule(step, args=(rows,)) for rows in halves]
            coordinator.join()
            parts = [part.fetch() for part in scheduled]
        losses.append(float(sum(part[0] for part in parts)))
        apply(weight, sum(part[1] for part in parts))
        apply(bias, sum(part[2] for part in parts))
        if number == 1:
            TRAINS.touch()
    return losses, [float(value) for value in np.concatenate([np.ravel(tf.convert_to_tensor(weight)), bias.numpy()])]


def apply(variable: tf.Variable, gradient: tf.Tensor) -> None:
    if not hasattr(variable, "variables"):
        variable.assign_sub(0.1 * gradient)
        return
    start = 0
    for part in variable.variables:  # the servers have a part each
        size = part.shape[0]
        part.assign_sub(0.1 * gradient[start : start + size])
        start += size


if __name__ == "__main__":
    main()
