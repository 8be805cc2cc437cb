"""Which task comes next: task sources, selectors, and the state that is a fold of the ledger."""
