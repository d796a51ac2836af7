"""What runs next: pure logic, events in, actions out."""
