"""Files of clients, stored durably by id: in a folder, or in an object store."""
