"""Rollouts that outlive their trainer: a service that drives agents in sandboxes, records every step durably and hands samples to trainers.

    schema.py       tasks, jobs, and the events of a trajectory: the one schema
    log.py          the append-only log: group commit, torn tails;  index.py: what SQL knows of it;  store.py: both, as one
    gate.py         work that can be stopped and taken up again;  budget.py: what a tree of rollouts may use
    policy.py       an OpenAI-compatible endpoint, or a script;  sse.py: its stream
    worker.py       one rollout from begin to end;  context.py: what a scaffold can do, each thing once
    scaffolds/      agents: bash, replay, command (inside the sandbox, by route.py and relay.py), mini (mini-swe-agent)
    boxes.py        sandboxes of rollouts;  scoring.py: verdicts;  diffs.py: what an agent hands in
    jobs.py         a trainer's job: what runs, what waits;  service.py: all jobs, recovery
    app.py, http.py, serve.py   the process and its HTTP API;  client.py: the trainer's side
    export.py       JSONL, verifiers, ATIF

It talks to sandboxes through `libdsec` only.
"""
