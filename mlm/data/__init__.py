"""From files to masked batches: reading, tokenizing, storing, packing, ordering."""
