"""Pure tensor code: no config objects, no environments, no files."""
