"""A prompt's blocks on their way: from the instance that has or computes them to one that goes on.

Somebody asks for the blocks of a prompt's tokens, to be computed there or not. There is one of
each:

- `source.Source` holds the blocks, and leases them part by part until they are read. It computes a
  prompt for another instance (`prefill`), or lends what is cached of one (`lend`).
- `sink.Sink` is where the request goes on. Its `Planner` decides whether blocks of its prompt come
  from elsewhere; all requests of an engine pass there. It has the engine reserve blocks, asks an
  `Origin` for what these lack, reads that, and lets the engine go on with what came and is proven.
- `machine.HandOver` decides what follows from what happens to one request, without I/O or clock:

    RESERVING  the engine makes room; what of the prompt is cached need not come
        |          enough is: it falls back
    QUEUED     the origin is asked, or a job waits for who takes it
        |
    PREFILLING parts come with tickets, and are read at once; each is settled when it is read
        |          the first token comes: it is shown
    READING    the last part is known, and not all are read
        |
    SETTLING   the source says whether the blocks were held until they were read
        |
    DECODING   the engine goes on; the source is left, the blocks are released

  Whatever fails before leads to FALLING BACK: the engine computes what is not proven. A transfer
  that is given up keeps its blocks until nothing of it can arrive any more. A prefix that another
  instance has is the case without computing: one part, and no first token.
- `part_reader.PartReader` brings the bytes of a part: `LeasedPartReader` by a mover, such as our
  agent of NIXL, vLLM's connector by itself (`llm.vllm.connector_reader`).

What the sides say to each other is in `messages`, what operators see of it in `observing`.
"""
