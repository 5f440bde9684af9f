"""`shm`: a backend of torch.distributed for tensors in host memory, for ranks that share one host's memory.

    import ddp
    dist.init_process_group("shm")                     # or "cpu:shm,cuda:nccl"
    group = dist.new_group(ranks, backend="shm")

It is registered when torch looks the name up, so `import ddp` changes nothing for other groups (backend.py).
`ddp.init()` uses it on the CPU if possible.

`backend.sharing(store, rank, size, timeout)` says for all ranks which of them share memory. Where not all ranks of a
group do, it goes by memory within hosts and by gloo between them (`across_hosts`, `hosts_group`).

Data is copied once into memory that all ranks have mapped, and read there by its receivers. Collectives of a group run
in the order in which they were called, each as rounds: a rank fills its slot, increments its counter, and continues
when the counters of all ranks have arrived; messages run concurrently. Values are combined by one tree of the ranks
for all sizes and timings, so the results are bitwise equal on all ranks and in every run; half precision, bfloat16 and
float8 are combined in float32 and rounded once within a host. Over several hosts the sum of each host is rounded to the
tensor's type, and then the sum of those once more.

Bottom up: `waiting` (futex, fence), `agreement` (one answer for all ranks), `memory` (the mapped segments), `rounds`
(counters, headers, dead ranks), `collectives` (the algorithms), `messages` (send and recv), `process_end`
(closes groups with the process), `engine` (order and threads of operations), `work` (flat tensors, and results),
`other_devices`, `group` (the process group), `backend` (registration with torch).
"""
