"""Archives and captures in object storage: reading by ranges, writing by multipart uploads."""
