"""What both planes share: data types, file formats, rules for texts and vectors, errors."""
