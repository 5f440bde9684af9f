"""`shm`: a backend of torch.distributed for tensors in host memory, for ranks that share one host's memory.

    import ddp
    dist.init_process_group("shm")                     # or "cpu:shm,cuda:nccl"
    group = dist.new_group(ranks, backend="shm")

Torch learns of it when it looks the name up, so `import ddp` changes nothing for other groups (backend.py).
`ddp.init()` takes it on the CPU if it can.

`backend.sharing(store, rank, size, timeout)` says for all ranks which of them share memory. Where not all ranks of a
group do, it goes by memory within hosts and by gloo between them (`across_hosts`, `peers`, `hosts_group`).

What is sent is copied once into memory that all ranks have mapped, and read there by those who want it. Collectives of
a group run in the order in which they were called, each as rounds: a rank fills its slot, raises its counter, and goes
on when the counters of all ranks are there; messages run beside them. Values are combined as rank 0 + rank 1 + ...
whatever the sizes and the timing, so that all ranks have the same bits in every run; half precision, bfloat16 and
float8 are combined in float32 and rounded once within a host. Over several hosts the sum of each host is rounded to the
tensor's type, and then the sum of those once more.

Bottom up: `waiting` (futex, fence), `agreement` (one answer for all ranks), `memory` (what is mapped where), `rounds`
(counters, headers, dead ranks), `combine` and `collectives` (the algorithms), `messages` (send and recv), `process_end`
(closes groups with the process), `engine` (what runs when, and in which thread), `work`, `flat` and `other_devices`
(what tensors may be), `group` (the process group), `backend` (what makes it known to torch).
"""
