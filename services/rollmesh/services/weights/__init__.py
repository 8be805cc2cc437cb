"""The depot: a durable weight node without an engine, where trainers upload and inference nodes fetch."""
