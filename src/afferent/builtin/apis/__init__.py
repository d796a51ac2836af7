"""APIs: each translates its requests to internal ones, and the answers back."""
