"""What a vocabulary is: its tokens' exact bytes, types, roles and classes."""
