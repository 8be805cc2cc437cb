"""The pure heart of the coordinator: no clock, no network, no storage, no randomness.

    input ---> decide.py ---> facts ---> apply.py ---> state
                  |                                      |
                  +--> effects (replies, calls to make) <+-- reads

`core.py` ties them: `Core.handle(input, now)` returns the facts that became true and the effects to release once those
facts are stored. `apply` is the only code that changes durable state; it serves live operation, recovery, audit and
simulator alike, and it never decides.

| file        | is                                                                                     |
| ----------- | -------------------------------------------------------------------------------------- |
| records.py  | values that facts and state share: spec, task, rewards, sample metadata                 |
| facts.py    | what can become true; mirrors `rollmesh/v1/events.proto`                                |
| state.py    | what is true: groups, episodes, samples, policy clocks, accounts                        |
| apply.py    | fact -> state, with the changes of groups in group_changes.py                          |
| bound.py    | the staleness bound and admission: the arithmetic of docs/staleness.md                  |
| rollouts.py | decisions about groups and episodes                                                    |
| reports.py  | decisions about reports of finished episodes                                           |
| epochs.py   | decisions about who trains, and what the last trainer left                             |
| guards.py   | what a trainer's request must pass first                                               |
| batches.py  | decisions about batch leases                                                           |
| commits.py  | decisions about what weights contain: commits, checkpoints, versions                    |
| ending.py   | decisions about the end of a run                                                       |
| core.py     | dispatch, waiting lists, deadlines, recovery                                           |
| fleet.py    | nodes and the weight rollout plan: ephemeral, rebuilt as nodes join again                |
"""
