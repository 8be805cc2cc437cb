"""Search, pages and documents for sessions: a corpus on disk, or a search endpoint outside. Served by the egress
proxy."""
