"""Files that can be trusted: checksums, and one writer per folder."""
