"""The pool of one split of a generated source."""

from rollmesh.services.data.generated import GeneratedOptions, GeneratedSource
from rollmesh.services.data.pool import MemoryPool
from rollmesh.services.data.task import Split


def pool_of(source: type[GeneratedSource], options: GeneratedOptions, split: Split) -> MemoryPool:
    return MemoryPool(task for task in source(options=options).tasks() if task.split is split)
