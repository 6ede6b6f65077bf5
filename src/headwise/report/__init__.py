"""The report: one page, tables and figures from artefacts alone."""
