"""What is checked, found or chosen before torch is imported: the command line, files, run folders."""
