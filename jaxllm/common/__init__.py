"""What all packages use: errors, files, strict JSON, checks of arguments, progress."""
