"""Image files: headers, the structure of JPEGs, resizing."""
