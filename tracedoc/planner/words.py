"""What the words of a plan mean: strategies, and what their traffic does to a step."""

from __future__ import annotations

WORDS: dict[str, str] = {
    "zero-1": """\
ZeRO-1: each GPU keeps the optimizer states of its share of the parameters only.

Shards   optimizer states (and the fp32 weights); parameters and gradients are whole on each GPU
Memory   4 + 12/N bytes a parameter with Adam in mixed precision, on N GPUs; DDP takes 16
Traffic  as DDP: gradients are reduced to their owners, updated parameters are gathered, 2
         elements a parameter
Use it   where DDP nearly fits: it costs no more than DDP, and the update is N times shorter
Names    DeepSpeed stage 1; PyTorch's ZeroRedundancyOptimizer, which sends a third more; FSDP
         has none
Plan     tracedoc plan --params 7e9 --gpus 8 --gpu A100 --framework deepspeed
Source   Rajbhandari et al. 2020, arXiv 1910.02054
""",
    "zero-2": """\
ZeRO-2: each GPU keeps gradients and optimizer states of its share of the parameters only.

Shards   gradients and optimizer states; 16-bit parameters are whole on each GPU
Memory   2 + 14/N bytes a parameter with Adam in mixed precision, on N GPUs
Traffic  2 elements a parameter and step, as DDP; with gradient accumulation gradients travel
         each time
Use it   for full fine-tuning where 16-bit parameters and activations fit on one GPU
Names    DeepSpeed stage 2; FSDP's SHARD_GRAD_OP is close, and takes 2 + 16/N bytes
Instead  ZeRO-3 where the parameters do not fit whole; DDP where everything does
Source   Rajbhandari et al. 2020, arXiv 1910.02054
""",
    "zero-3": """\
ZeRO-3: parameters, gradients and optimizer states are all shared out; layers are gathered as
they are needed.

Shards   everything; a layer's parameters are gathered before its forward and again before its
         backward pass
Memory   16/N bytes a parameter with Adam in mixed precision, and two gathered blocks
Traffic  3 elements a parameter and step: two all-gathers and a reduce-scatter, half more than
         DDP
Use it   where 16-bit parameters do not fit whole beside the rest; across nodes only on a fast
         network
Names    DeepSpeed stage 3; FSDP FULL_SHARD. DeepSpeed alone can keep the states on NVMe
Watch    units that are too fine, and small batches: each gather costs its latency, in every
         layer
Source   Rajbhandari et al. 2020, arXiv 1910.02054
""",
    "fsdp": """\
FSDP, fully sharded data parallel: PyTorch's way to shard parameters, gradients and optimizer
states.

Shards   FULL_SHARD everything (as ZeRO-3); SHARD_GRAD_OP keeps what it gathered until the
         backward pass
Memory   16/N bytes a parameter with FULL_SHARD, 2 + 16/N with SHARD_GRAD_OP, and the largest
         gathered unit twice
Traffic  3 elements a parameter and step with FULL_SHARD, 2 with SHARD_GRAD_OP
Use it   where DDP does not fit: SHARD_GRAD_OP while its memory lasts, else FULL_SHARD
Units    one for each transformer block: the whole model as one unit hides nothing, finer units
         gather too often
Names    fully_shard(block, reshard_after_forward=True) is FULL_SHARD in FSDP2, False is
         SHARD_GRAD_OP
Plan     tracedoc plan --params 7e9 --gpus 8 --gpu H100
""",
    "hsdp": """\
HSDP, hybrid sharding: parameters are sharded inside a node and repeated on every node.

Shards   everything, over the G GPUs of one node
Memory   16/G bytes a parameter with Adam in mixed precision, however many nodes there are
Traffic  3 elements a parameter inside the node, and an all-reduce of each GPU's 1/G of the
         gradients across
Use it   on several nodes whose network is slower than NVLink, where one node holds all states
Instead  FULL_SHARD over all GPUs where one node does not hold them
Names    FSDP HYBRID_SHARD; in FSDP2 a mesh of two dimensions, ("replicate", "shard")
Plan     tracedoc plan --params 7e9 --gpus 16 --nodes 2 --gpu A100 --network 100Gbit/s
""",
    "all-reduce": """\
All-reduce: every rank ends with the sum of what all ranks had. DDP reduces gradients with it.

Traffic  2 (N-1)/N times the bytes from each of N GPUs, in a ring: nearly twice, however many
         GPUs there are
Is       a reduce-scatter and an all-gather; that is why ZeRO-1, which has these two, costs no
         more than DDP
Time     a latency for each call, and its traffic over the bandwidth of the slowest link in the
         ring
Hides    behind the backward pass, bucket by bucket; the last bucket cannot
Watch    many small calls (latency), one large call (nothing hides), a rank that comes late (all
         others wait)
Bus      bandwidth counts that traffic over the time, so that it compares with the link:
         tracedoc facts RUN
""",
    "exposed": """\
Exposed: communication during which the GPU computes nothing. It lengthens the step; hidden
communication does not.

Counted  the time in which a collective runs and no compute kernel does, on one GPU, as a union
Gain     hiding it gives at most what is exposed, and at most the computation that there is to
         hide it behind
Not      blocking: a step may wait for a late rank, and that wait is exposed too, but no link is
         slow
Less     larger buckets or micro-batches, prefetched units, gradients in 16 bits, no sharding
         where it fits
In runs  FSDP's published steps are as long as if three quarters of its communication were
         exposed over NVLink, and a third over slow networks
Facts    tracedoc explain exposed_comm_ms
""",
    "offload": """\
Offload: model states live in host memory (or on NVMe) and cross PCIe to the GPU in each step.

Moves    the optimizer and its gradients (DeepSpeed from ZeRO-1 on), or everything (FSDP,
         ZeRO-3)
Memory   of the GPU: 2 to 4 bytes a parameter stay, or the gathered units alone; of the host 12
         to 16 bytes a parameter
Traffic  gradients out and parameters back over PCIe, at some 16 GB/s a GPU; everything: twice
         more
Time     the update runs on the CPUs: plan for 25 to 50 % of the speed, or less
Use it   before three times the GPUs, after checkpointing, smaller micro-batches and 8-bit Adam
One GPU  ZeRO-Offload trains 13e9 parameters on one GPU of 32 GB (Ren et al. 2021, arXiv
         2101.06840)
Plan     tracedoc plan --params 13e9 --gpus 1 --gpu "V100 32GB" --framework deepspeed --offload
         optimizer
""",
    "tp": """\
TP, tensor parallelism: the GPUs of a node share each matrix, and the activations between matrices.

Shards   weights, gradients, optimizer and activations of every block, by the degree t
Memory   1/t of the model on each GPU; with sequence parallelism also 1/t of its activations
Traffic  the residual stream four times a block in forward and four times in backward, in every
         micro-batch
Use it   inside a node with NVLink, where one block or its activations are too large for FSDP
Watch    nothing else runs while it is sent: over PCIe or between nodes it takes most of the step
Names    tensor_parallel_degree (torchtitan), --tensor-model-parallel-size and
         --sequence-parallel (Megatron)
Plan     tracedoc plan --params 70B --gpus 64 --gpu H100 --framework torchtitan
Source   Korthikanti et al. 2022, arXiv 2205.05198
""",
    "pp": """\
PP, pipeline parallelism: each stage of GPUs has some of the blocks, and passes micro-batches on.

Shards   blocks, by the degree p; the first stage keeps the activations of p micro-batches
Memory   1/p of the model on each GPU, and as many activations as without it (1F1B)
Traffic  the residual stream of a micro-batch once to the next stage and once back: little
Bubble   stages wait (p - 1)/(m + p - 1) of the step with m micro-batches; interleaved half of
         it
Use it   across nodes, with four times as many micro-batches as stages or more
Watch    the slowest stage sets the pace: embedding and head count as a block each
Names    pipeline_parallel_degree (torchtitan), --pipeline-model-parallel-size (Megatron)
Source   Narayanan et al. 2021, arXiv 2104.04473
""",
    "cp": """\
CP, context parallelism: each GPU has a part of every sequence; only attention needs the others.

Shards   activations, by the degree c; states are sharded over these GPUs as over data-parallel
         ones
Memory   1/c of the activations of a sequence on each GPU
Traffic  keys and values of every attention, forward and backward
Use it   for sequences whose activations do not fit on one GPU, from some 8 k tokens a part on
Instead  smaller micro-batches and checkpointing, while one sequence fits
Names    context_parallel_degree (torchtitan), --context-parallel-size (Megatron)
Plan     tracedoc plan --params 8B --gpus 8 --gpu H100 --seq 131072 --framework torchtitan
""",
    "ep": """\
EP, expert parallelism: each GPU has some of the experts of every block, and tokens travel to
them.

Shards   experts, by the degree e, out of the data-parallel GPUs; all else stays as it is
Memory   1/e of the experts on each GPU, and what their gradients and optimizer take
Traffic  each token's numbers to its experts and back, in forward and in backward: two all-to-all
         a block each
Use it   for models whose experts do not fit beside each other; inside a node if they can
Watch    uneven routing: the GPU with the busiest experts sets the pace, which no plan foresees
Names    expert_parallel_degree (torchtitan), --expert-model-parallel-size (Megatron)
Plan     tracedoc plan --model config.json --gpus 64 --gpu H100 --framework megatron
""",
}
"""Each word: what it shards, memory and traffic of each GPU (Adam, mixed precision), and its use."""
