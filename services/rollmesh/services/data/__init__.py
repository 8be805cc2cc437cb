"""The data service: task sources, selectors, and draws whose state is a fold of the ledger."""
