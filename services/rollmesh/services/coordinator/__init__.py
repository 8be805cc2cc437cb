"""The coordinator service: admission, leases, the staleness bound, the ledger, the fleet and the weight rollout."""
