"""The collective operations of the public interface."""
