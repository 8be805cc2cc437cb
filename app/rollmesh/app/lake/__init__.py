"""The samples of a run as Parquet files: export with lineage, SQL, and formats of other tools."""
