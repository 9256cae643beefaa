"""The ledger's file format: records, schema, reader, writer."""
