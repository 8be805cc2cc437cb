"""The pure core of the coordinator: no clock, no network, no storage, no randomness.

    input ---> core.py: dispatch ---> modules that decide ---> facts ---> apply.py ---> state
                   |                        ^      |                                      |
                   |                        +------|----------- reads -------------------+
                   +---- Decision(facts, effects) <+

`Core.handle(input, now)` returns facts and effects. The driver stores the facts as one ledger record and then releases
the effects: replies, and calls to other services. `apply` is the only code that changes durable state. It never
decides, and it serves live operation, recovery, audit and simulator.

| file                | contents                                                                       |
| ------------------- | ------------------------------------------------------------------------------ |
| records.py          | the spec of a run, the bound, the bases of requests and of generated records   |
| facts.py            | the facts of the ledger and the values in them, generated from events.proto    |
| state.py            | durable state: groups, episodes, samples, policy clocks, batches, counters     |
| apply.py            | fact -> state; group_changes.py has the changes that several facts share       |
| messages.py         | requests and replies of the contract as they are, generated from the protos    |
| inputs.py           | all other inputs and replies                                                   |
| decision_context.py | what one decision reads and writes: state, ephemeral state, effects            |
| bound.py            | the staleness bound and admission: the arithmetic of docs/staleness.md         |
| demand.py           | admission on demand: how many groups the learner needs ahead; ephemeral        |
| rollouts.py         | decides on groups and episodes                                                 |
| reports.py          | decides on reports of finished episodes                                        |
| epochs.py           | decides who trains, and on batches that the last trainer left                  |
| guards.py           | checks of a trainer's request                                                  |
| batches.py          | decides on batch leases                                                        |
| commits.py          | decides what weights contain: commits, checkpoints, versions                   |
| changes.py          | decides on changes of settings                                                 |
| limits.py           | decides when a run reaches a limit                                             |
| stall.py            | decides on stalls and on replays of dead letters                               |
| ending.py           | decides on the end of a run                                                    |
| core.py             | dispatch, order of the steps, deadlines, recovery                              |
| fleet.py            | nodes and the weight rollout plan; ephemeral, rebuilt as nodes join again      |
| waits.py            | text: the wait chain of a run, for status and watchdog; decides nothing        |
"""
