"""Trains with MultiWorkerMirroredStrategy, or in one process where there is no TF_CONFIG; see test_tensorflow.py.

Each worker takes its share of one fixed batch, so that every number is that of one process. The evaluator reads the
checkpoints that the first worker writes, and the first worker waits for its word on the last one.
"""

import argparse
import json
import os
import pathlib
import time

import numpy as np
import tensorflow as tf

STEPS, ROWS = 6, 12


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", type=pathlib.Path)
    parser.add_argument("--fail-at", type=int, default=-1)
    args = parser.parse_args()
    config = json.loads(os.environ.get("TF_CONFIG", '{"task": {"type": "worker", "index": 0}, "cluster": {}}'))
    task = (config["task"]["type"], config["task"]["index"])
    if task[0] == "evaluator":
        evaluate(args.checkpoints)
        return
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if config["cluster"] else tf.distribute.get_strategy()
    leads = task in (("chief", 0), ("worker", 0)) and (task[0] == "chief" or "chief" not in config["cluster"])
    with strategy.scope():
        model = build()
        optimizer = tf.keras.optimizers.SGD(0.05, momentum=0.9)
    data = strategy.distribute_datasets_from_function(share)

    @tf.function
    def step(x, y):
        def part(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((model(x) - y) ** 2) / ROWS
            optimizer.apply_gradients(
                zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
            )
            return loss

        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(part, args=(x, y)), axis=None)

    checkpoint = tf.train.Checkpoint(model=model)
    for number, (x, y) in zip(range(STEPS), data, strict=False):
        if number == args.fail_at and task == ("worker", 1):
            raise ArithmeticError("this worker gives up")
        print(f"{task[0]} {task[1]} step {number} loss {step(x, y).numpy():.10f}", flush=True)
    print("trained with", strategy.num_replicas_in_sync, "replicas", flush=True)
    if leads and args.checkpoints is not None:
        checkpoint.write(str(args.checkpoints / "last"))
        wait_for(args.checkpoints / "evaluated")


def build() -> tf.keras.Model:
    start = np.random.default_rng(7)
    model = tf.keras.Sequential(
        [
            tf.keras.Input((3,), dtype="float64"),
            tf.keras.layers.Dense(5, "tanh", dtype="float64"),
            tf.keras.layers.Dense(1, dtype="float64"),
        ]
    )
    model.set_weights([start.normal(size=weight.shape) for weight in model.get_weights()])
    return model


def batch() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(1).normal(size=(ROWS, 3))
    return x, np.sin(x.sum(axis=1, keepdims=True))


def share(context: tf.distribute.InputContext) -> tf.data.Dataset:
    rows = tf.data.Dataset.from_tensor_slices(batch()).shard(context.num_input_pipelines, context.input_pipeline_id)
    return rows.batch(context.get_per_replica_batch_size(ROWS)).repeat()


def evaluate(checkpoints: pathlib.Path) -> None:
    wait_for(checkpoints / "last.index")
    model = build()
    tf.train.Checkpoint(model=model).restore(str(checkpoints / "last")).expect_partial()
    x, y = batch()
    print(f"evaluator loss {float(tf.reduce_mean((model(x) - y) ** 2)):.10f}", flush=True)
    (checkpoints / "evaluated").touch()
    time.sleep(600)  # as evaluators do, it waits for the next checkpoint


def wait_for(path: pathlib.Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} is not there after 60 s")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
